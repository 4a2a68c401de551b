#!/bin/sh
# A stage in POSIX shell.  PROGRAM = /path/stage.sh [NEXT_STAGE]; the dispatcher adds: worker -c CONFIG_FILE
# Note: psql's command line is for all to see; a password belongs into ~/.pgpass, not into DATABASE.
next=; [ $# -eq 4 ] && next=$1
for config; do :; done  # the last argument
database=$(sed -n '/^\[pepsi\]/,/^\[/s/^[Dd][Aa][Tt][Aa][Bb][Aa][Ss][Ee] *[=:] *//p' "$config")
export PGCLIENTENCODING=UTF8
exec 3>&1 >&2  # only answers go to the dispatcher

sql() { psql -Xq -v ON_ERROR_STOP=1 -v id="$1" -v stage="$PEPSI_STAGE" -v next="$next" -d "$database" 3>&-; }

sql 0 < /dev/null || exit  # before an id is read: who cannot connect has not begun, and no message is blamed
while read -r id; do
    # Here goes the work on message $id; nothing in it may read standard input.
    sql "$id" << 'END'
        UPDATE queue
           SET stage = CASE :'next' WHEN '' THEN stage ELSE :'next' END,
               status = CASE :'next' WHEN '' THEN 'done' ELSE 'running' END
         WHERE ingress_id = :'id' AND stage = :'stage' AND status = 'running'
END
    case $? in
        0) echo "0 id=$id" >&3 ;;
        2) exit 2 ;;  # the connection broke: what became of the row is for the dispatcher to find out
        *) echo "1 id=$id psql failed" >&3 ;;
    esac
done
