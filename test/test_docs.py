"""What README.md, CHANGES.md and the manual page say agrees with the program, and their examples work."""
import ast
import configparser
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pepsidispatch
import psycopg2.extensions
import pytest
import support
import worker_stub

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
LIBRARY = os.path.dirname(os.path.abspath(worker_stub.__file__))


def read(name):
    """Return the text of a file of the project."""
    with open(os.path.join(ROOT, name), encoding='utf-8') as file:
        return file.read()


README = read('README.md')
MAN = read('pepsi-dispatch.1')
with open(support.DISPATCHER, encoding='utf-8') as _file:
    SOURCE = ast.parse(_file.read())

SECTIONS = dict(re.findall(r'^\.Sh (.*)\n((?:(?!\.Sh ).*\n)*)', MAN, re.MULTILINE))
ORDER = ['NAME', 'SYNOPSIS', 'DESCRIPTION', 'COMMANDS', 'OPTIONS', 'CONFIGURATION', 'WORKER PROTOCOL', 'STRATEGIES',
         'STATES', 'SIGNALS', 'MONITORING', 'ENVIRONMENT', 'FILES', 'EXIT STATUS', 'EXAMPLES', 'DIAGNOSTICS',
         'SEE ALSO', 'BUGS']
MACROS = ('Fl Ar Cm No Ns Op Li Em Sy Ev Pa Dv Sx Xr Pq Dq Ql Nm It Bl El Pp Dl Bd Ed Ss Fn').split()


def plain(mdoc):
    """Return mdoc source as running text, good enough to look for phrases in it."""
    words = []
    for line in mdoc.splitlines():
        if line.startswith('.'):
            words += [word for word in line[1:].split() if word not in MACROS]
        else:
            words += line.split()
    return re.sub(r' ([,.;:])(?= |$)', r'\1', ' '.join(words))


def show(words):
    """Return the words of an mdoc line with options as they are typed: 'Fl c Ar FILE' becomes '-c FILE'."""
    text, flag, glue = '', False, True
    for word in words:
        if word in MACROS:
            flag, glue = word == 'Fl', word == 'Ns' or (glue and word != 'No')
        elif word != ',':
            text += ('' if glue else ' ') + ('-' + word if flag and word != '|' else word)
            glue = False
    return text


def blocks(text, language):
    """Return the code blocks of a language in Markdown; '' stands for none."""
    fenced = re.findall(r'^```(\w*)\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    return [block for name, block in fenced if name == language]


def literals(section):
    """Return the literal displays of a section of the manual page."""
    return re.findall(r'^\.Bd -literal.*\n((?:(?!\.Ed).*\n)*)', SECTIONS[section], re.MULTILINE)


def find_block(language, start):
    """Return the one code block of README.md that begins so."""
    [block] = [block for block in blocks(README, language) if block.startswith(start)]
    return block


# -- the command line --------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def usage():
    """What --help prints, as its parts: name -> lines."""
    result = support.call('--help')
    assert result.code == 0 and result.err == ''
    parts = {}
    for title in 'Usage', 'Commands', 'Options':
        found = re.search(r'^%s:\n((?:  .*\n?)+)' % title, result.out, re.MULTILINE)
        parts[title] = [line.strip() for line in found.group(1).splitlines()]
    return parts


def test_manual_page_has_the_usual_sections_in_the_usual_order():
    assert re.findall(r'^\.Sh (.*)$', MAN, re.MULTILINE) == ORDER


def test_manual_page_is_clean():
    if not shutil.which('mandoc'):
        pytest.skip('no mandoc here')
    done = subprocess.run(['mandoc', '-T', 'lint', '-W', 'warning', os.path.join(ROOT, 'pepsi-dispatch.1')],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert (done.returncode, done.stdout) == (0, b'')


def test_synopsis_is_the_usage(usage):
    synopsis = []
    for line in SECTIONS['SYNOPSIS'].splitlines():
        if line == '.Nm':
            synopsis.append('pepsi-dispatch')
        else:
            synopsis[-1] += {'.Op': ' [%s]', '.Pq': ' (%s)'}.get(line[:3], ' %s') % show(line[1:].split())
    assert synopsis == usage['Usage']


def test_options_are_those_of_the_help(usage):
    heads = re.findall(r'^\.It (.*)$', SECTIONS['OPTIONS'], re.MULTILINE)
    assert {show(head.split()) for head in heads} == {re.split('  +', line)[0] for line in usage['Options']}


def test_commands_are_those_of_the_help(usage):
    described = re.findall(r'^\.It Cm (\S+)$', SECTIONS['COMMANDS'], re.MULTILINE)
    assert described == [line.split()[0] for line in usage['Commands']]


def test_exit_codes_are_those_of_the_program():
    codes = {value for name, value in vars(pepsidispatch).items() if name.startswith('EXIT_')}
    described = [int(code) for code in re.findall(r'^\.It (\d+)$', SECTIONS['EXIT STATUS'], re.MULTILINE)]
    assert described == sorted(codes)
    for code in re.findall(r'[Ee]xit (\d+)|exits with (\d+)', MAN):
        assert int(''.join(code)) in described


def test_signals_are_those_that_are_caught():
    caught = {signal.Signals(number).name[3:] for number in pepsidispatch.Signals.CAUGHT} - {'CHLD'}
    heads = re.findall(r'^\.It Dv (.*)$', SECTIONS['SIGNALS'], re.MULTILINE)
    assert set(re.findall(r'[A-Z0-9]+', ' '.join(heads))) == caught


# -- configuration -----------------------------------------------------------------------------------------------------

def list_options():
    """Return what the program knows: (section, option, default or 'required' or None where it is no fixed value)."""
    shown = {'pepsi': '[pepsi]', 'pepsi-dispatch': '[pepsi-dispatch]', 'stage-': '[stage-NAME]'}
    return [(shown[section], option.name, 'required' if option.default is None else option.default or None)
            for section, options in pepsidispatch.OPTIONS.items() for option in options]


def test_options_of_the_configuration_in_the_manual_page_are_those_of_the_program():
    described, section = [], None
    for line in SECTIONS['CONFIGURATION'].splitlines():
        if line.startswith('.Ss '):
            section = line[4:]
        item = re.match(r'\.It Cm (\S+) = Ar \S+ Pq (.*)$', line)
        if item:
            fixed = re.match(r'[0-9]|required$', item.group(2))
            described.append((section, item.group(1), item.group(2) if fixed else None))
    assert described == list_options()


def test_options_of_the_configuration_in_the_readme_are_those_of_the_program():
    described, section = [], None
    for row in re.findall(r'^\| (\S+) \| (.*?) ?\| .*\|$', README[README.index('### Configuration'):], re.MULTILINE):
        name, default = row
        if name.startswith('**'):
            section = name.strip('*`')
        elif re.match('`[A-Z_]+`$', name):
            described.append((section, name.strip('`'), None if default.startswith('(') else default))
    assert described == list_options()


@pytest.mark.parametrize('text', blocks(README, 'ini')[:1] + literals('EXAMPLES')[:1], ids=['README', 'manual'])
def test_an_example_of_a_configuration_is_read_without_a_warning(text):
    config = pepsidispatch.parse_config(text, 'pepsi.conf')
    assert len(config.stages) == 2 and config.warnings == ()


def test_section_for_supervisord_is_the_one_of_the_sample():
    sample = support.call('sample', env={'PEPSI_CONFIG': '/nonexistent'})
    assert sample.code == 0
    section = [line[2:] for line in sample.out.splitlines() if line.startswith('; ')]
    assert section == find_block('ini', '[program:').splitlines()


def test_supervisord_waits_longer_than_a_stop_takes():
    parser = configparser.RawConfigParser()
    parser.read_file(io.StringIO(find_block('ini', '[program:')))
    program = dict(parser.items('program:pepsi-dispatch'))
    stop_timeout_s = pepsidispatch.parse_config('', 'pepsi.conf').stop_timeout_s
    assert float(program['stopwaitsecs']) > stop_timeout_s + pepsidispatch.FINISH_S + 1
    assert (program['stopsignal'], program['stopasgroup'], program['killasgroup']) == ('TERM', 'false', 'true')


# -- states, tables, numbers -------------------------------------------------------------------------------------------

def test_states_are_those_of_the_program():
    statuses = re.search(r'CHECK \(status IN \((.*?)\)\)', pepsidispatch.SCHEMA).group(1).replace("'", '').split(', ')
    kinds = ['status:', 'crash:', 'timeout:', 'protocol:', 'unfinished:']
    wanted = statuses + kinds + [state.value for states in (pepsidispatch.WorkerState, pepsidispatch.Link,
                                                            pepsidispatch.Phase) for state in states]
    assert re.findall(r'^\.It Li (\S+)$', SECTIONS['STATES'], re.MULTILINE) == wanted
    assert {row.value for row in pepsidispatch.Row} <= set(statuses)


def find_strings():
    """Return all strings of the program that are not docstrings of it."""
    for node in ast.walk(SOURCE):
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            continue
        if isinstance(value, str):
            yield value


def test_kinds_of_failures_are_those_of_the_program():
    found = set()
    for text in find_strings():
        kind = re.match(r'(status|crash|timeout|protocol|unfinished): ', text)
        found |= {kind.group(1)} if kind else set()
    assert found == {'status', 'crash', 'timeout', 'protocol', 'unfinished'}


def test_tables_are_described_with_all_their_columns():
    text = plain(SECTIONS['COMMANDS'])
    for table, columns in re.findall(r'CREATE TABLE IF NOT EXISTS (\w+) \((.*?)\n\)', pepsidispatch.SCHEMA, re.DOTALL):
        assert re.search(r'\b%s\b' % table, text), table
        for column in re.findall(r'^    ([a-z_]+) ', columns, re.MULTILINE):
            assert re.search(r'\b%s\b' % column, text), '%s.%s' % (table, column)


def test_indexes_are_described_with_their_columns():
    text = plain(SECTIONS['COMMANDS'])
    found = re.findall(r'CREATE INDEX IF NOT EXISTS (\w+) ON queue \((.*)\)$|CREATE INDEX IF NOT EXISTS (\w+) ON queue '
                       r'\((.*?)\) WHERE', pepsidispatch.SCHEMA, re.MULTILINE)
    assert len(found) == 3
    for parts in found:
        name, columns = [part for part in parts if part]
        assert '%s on %s' % (name, columns) in text


def test_environment_of_workers_is_described():
    [call] = [node for node in ast.walk(SOURCE) if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'dict'
              and any(keyword.arg == 'PEPSI_STAGE' for keyword in node.keywords)]
    described = re.findall(r'^\.It Ev (\S+)$', SECTIONS['ENVIRONMENT'], re.MULTILINE)
    assert {keyword.arg for keyword in call.keywords} == set(described) - {
        'PEPSI_CONFIG', 'PATH', 'NO_COLOR', 'JOURNAL_STREAM'}


def s(seconds):
    """Return a duration as the manual page writes it."""
    return '%g s' % seconds


def test_numbers_in_the_manual_page_are_those_of_the_program():
    p = pepsidispatch
    assert p.RECONNECT_S == p.FAILURE_S and p.LOCK_POLL_S == 0.5 and p.SWEEP_SHARE == 0.01  # 'twice', 'one hundredth'
    least = p.OPTIONS['stage-'][2]
    assert least.name == 'QUEUE_LIMIT' and least.parse('1000') == 1000
    assert p.STRANGERS_S == 3600  # 'once an hour'
    text = plain(MAN)
    for phrase in [
            '%s after it, and then once an hour' % s(p.STRANGERS_FIRST_S),
            'passed over for %s and then for longer, up to %s' % tuple(map(s, p.DEFER_S)),
            'exit with 75 after %s' % s(p.NO_WAIT_S),
            'they are written after %s' % s(p.IDLE_FLUSH_S),
            'from 1 to 1000',
            'A line has %d bytes at most' % p.LINE_LIMIT,
            'no worker has answered for %s' % s(p.FILL_S),
            'only when none has answered for %s' % s(p.FILL_S),
            'Look again every %s' % s(p.WATCH_S),
            'are passed over after %s' % s(p.LOCK_TIMEOUT_S),
            'the others wait for that, %s at most' % s(p.PROBE_S),
            'or %d deaths in a row' % p.DEATHS_IN_A_ROW,
            'The delay is %s and doubles up to %s while no message is blamed, up to %s where' % tuple(
                map(s, p.COOLDOWN_S)),
            'is put off alone, for %s and then for longer, up to %s' % tuple(map(s, p.DEFER_S)),
            'rests for %s' % s(p.RETRY_GAP_S),
            'follows after %s, then after twice as long each time, up to %s' % tuple(map(s, p.RECONNECT_S)),
            'at most %d characters' % p.REASON_LIMIT,
            '%s after the last worker has gone at most' % s(p.FINISH_S),
            'cut at %d bytes' % p.LogHandler.LIMIT,
            'it may take %s' % s(p.SWEEP_TIMEOUT_S),
            p.CONFIG_DEFAULT]:
        assert phrase in text


def test_changes_begin_with_this_version():
    assert re.search(r'^## (.*)$', read('CHANGES.md'), re.MULTILINE).group(1) == pepsidispatch.__version__


# -- what the log says -------------------------------------------------------------------------------------------------

def find_texts(node):
    """Return the format strings that an expression may have as its value."""
    try:
        value = ast.literal_eval(node)
        return [value] if isinstance(value, str) else []
    except (ValueError, TypeError, SyntaxError):
        pass
    if isinstance(node, ast.Name) and node.id.isupper():  # a constant of the module
        value = getattr(pepsidispatch, node.id)
        return [value] if isinstance(value, str) else []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return find_texts(node.left)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in find_texts(node.left) for right in find_texts(node.right)]
    if isinstance(node, ast.IfExp):
        return find_texts(node.body) + find_texts(node.orelse)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return find_texts(node.elt)
    if isinstance(node, ast.Starred):
        return find_texts(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):  # what a function of the module returns
        return [text for definition in SOURCE.body if getattr(definition, 'name', '') == node.func.id
                for part in ast.walk(definition) if isinstance(part, ast.Return) and part.value
                for text in find_texts(part.value)]
    return []


def find_assignment(name):
    """Return what a local variable that holds a text is set to, a constant if there is no such one."""
    for node in ast.walk(SOURCE):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == name:
            if any('%' in text for text in find_texts(node.value)):
                return node.value
    return ast.parse('None').body[0]


def is_complaint(level):
    """Tell whether an expression for a level may be that of a warning or an error."""
    if isinstance(level, ast.Name):
        return any(is_complaint(node.value) for node in ast.walk(SOURCE)
                   if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == level.id
                   and not isinstance(node.value, ast.Name))
    return bool(re.search('WARNING|ERROR', ast.dump(level)))


def find_complaints():
    """Return the formats of all warnings and errors, and of the parts that they are made of: (format, whole)."""
    found = set()
    for node in ast.walk(SOURCE):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, 'attr', None) or getattr(node.func, 'id', '')
        owner = getattr(getattr(node.func, 'value', None), 'id', '')
        whole, arguments = True, []
        if owner == 'log' and name in ('warning', 'error', 'exception', 'critical'):
            arguments = node.args[:1]
        elif owner == 'log' and name == 'log' and is_complaint(node.args[0]):
            arguments = node.args[1:2]
        elif name == 'note' and re.search('warning|error', ast.dump(node.args[0])):
            arguments = node.args[1:2]
        elif name == 'LogRecord':
            arguments = node.args[4:5]
        elif name == '_ill':
            arguments = node.args[1:]
        elif name == 'Failure' or (owner in ('errors', 'warnings') and name in ('append', 'extend')):
            arguments = node.args
        elif name == 'write' and ast.dump(node.func.value).count("'stderr'"):
            arguments = node.args
        elif name in ('_cool', '_lose', 'give_up', 'Unusable'):
            whole, arguments = False, node.args
        for argument in arguments:
            if isinstance(argument, ast.Name) and not argument.id.isupper():
                argument = find_assignment(argument.id)
            found |= {(text.strip('\n'), whole) for text in find_texts(argument)
                      if re.search('[a-z]{3}', re.sub('%.', '', text))}
    return found


def as_pattern(text):
    """Return a regular expression for what a format can become."""
    return '.*'.join(re.escape(part.replace('%%', '%')) for part in re.split(r'%[-+#0 ]*[0-9.]*[a-z]', text))


COMPLAINTS = sorted(find_complaints())
HEADS = re.findall(r'^\.It Sy "(.*)"$', SECTIONS['DIAGNOSTICS'], re.MULTILINE)


def test_the_search_for_complaints_finds_them():
    assert len(COMPLAINTS) > 30
    for text in ('killing worker %d stage=%s id=%s: %s', 'reaped worker %d stage=%s: %s after %s and %d answers%s',
                 'the tables are missing or unusable: %s; run pepsi-dispatch init', 'rows wait at %s'):
        assert (text, True) in COMPLAINTS


@pytest.mark.parametrize('text, whole', COMPLAINTS, ids=[text for text, _ in COMPLAINTS])
def test_a_warning_or_error_is_explained(text, whole):
    matches = re.fullmatch if whole else re.search
    assert any(matches(as_pattern(text), head) for head in HEADS), 'not in DIAGNOSTICS: %s' % text


@pytest.mark.parametrize('head', HEADS)
def test_what_is_explained_can_be_logged(head):
    assert any(re.fullmatch(as_pattern(text), head) for text, whole in COMPLAINTS if whole), 'nothing logs %s' % head


def test_each_explanation_has_a_remedy():
    for entry in SECTIONS['DIAGNOSTICS'].split('\n.It Sy ')[1:]:
        assert len(entry.splitlines()) > 1, 'nothing is said about %s' % entry


# -- the examples ------------------------------------------------------------------------------------------------------

@pytest.fixture
def mail(pg, dsn, db, tmp_path):
    """A directory with the files of README.md, in place of /srv/mail and /etc/pepsi, and the environment to use them:
    its database is named by the variables of libpq, its python3 is ours."""
    for name, block in (('count.py', find_block('python', '#!')), ('announce.sh', find_block('sh', '#!'))):
        path = tmp_path / name
        path.write_text(block)
        path.chmod(0o755)
    (tmp_path / 'bin').mkdir()
    config = blocks(README, 'ini')[0].replace('postgresql:///mail', '').replace('/srv/mail', str(tmp_path))
    (tmp_path / 'pepsi.conf').write_text(config)
    db.cursor().execute('CREATE TABLE word_count (message bigint PRIMARY KEY, words int NOT NULL)')
    where = psycopg2.extensions.parse_dsn(dsn)
    path = [str(tmp_path / 'bin'), os.path.dirname(sys.executable), os.environ['PATH'], os.path.dirname(pg.psql or '')]
    environment = {
        'PEPSI_CONFIG': str(tmp_path / 'pepsi.conf'), 'PYTHONPATH': LIBRARY, 'PATH': os.pathsep.join(path),
        'PGHOST': where['host'], 'PGPORT': where['port'], 'PGUSER': where['user'], 'PGDATABASE': where['dbname']}
    return tmp_path, environment


def configure(directory, old, new):
    """Change something in the pepsi.conf of README.md."""
    config = (directory / 'pepsi.conf').read_text()
    assert old in config
    (directory / 'pepsi.conf').write_text(config.replace(old, new))


def wait_for_row(db, wanted):
    """Wait until the one message is at this stage with this status."""
    def find():
        with db.cursor() as cursor:
            cursor.execute('SELECT stage, status FROM queue')
            return cursor.fetchall() == [wanted]
    support.wait_until(find, 20, wanted)


def drop_script(mail):
    """Install the script as README.md says, with our directory in place of /usr/local/bin."""
    subprocess.check_call(['sh', '-ec', find_block('sh', 'install ').replace('/usr/local/bin', str(mail[0] / 'bin'))],
                          cwd=ROOT)


def run_block(mail, start, code=0):
    """Run a block of commands of README.md; return what it writes to standard output."""
    drop_script(mail)
    done = subprocess.run(['sh', '-ec', find_block('sh', start)], env=dict(os.environ, **mail[1]),
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert done.returncode == code
    return done.stdout.decode()


def test_the_stage_in_python_counts_words_and_sends_the_message_on(mail, db):
    directory, environment = mail
    configure(directory, 'PARALLELISM = 1', 'PARALLELISM = 0')
    assert support.call('init', env=environment).code == 0
    db.cursor().execute(find_block('sql', 'INSERT'))
    with support.Running(str(directory / 'pepsi.conf'), env=environment):
        wait_for_row(db, ('announce', 'pending'))
    with db.cursor() as cursor, open('/etc/passwd', 'rb') as file:
        cursor.execute('SELECT words FROM word_count')
        assert cursor.fetchall() == [(len(file.read().split()),)]


def test_the_stage_in_shell_announces_the_message_and_ends_it(pg, mail, db):
    if not pg.psql:
        pytest.skip('no psql here')
    directory, environment = mail
    assert support.call('init', env=environment).code == 0
    db.cursor().execute("INSERT INTO queue (stage) VALUES ('announce')")
    with support.Running(str(directory / 'pepsi.conf'), env=environment) as running:
        wait_for_row(db, ('announce', 'done'))
        running.wait_log('^message 1 has been counted$')
        assert 'protocol' not in running.log()


def test_the_script_is_dropped_and_started_as_the_readme_says(mail, db):
    """The blocks of commands of 'Run it'; then Ctrl-C. check finds nothing that is wrong."""
    directory, environment = mail
    drop_script(mail)
    commands = find_block('sh', 'pepsi-dispatch init')
    assert commands.splitlines()[-1] == 'pepsi-dispatch'
    commands = re.sub('^pepsi-dispatch$', 'exec pepsi-dispatch', commands, flags=re.MULTILINE)
    with open(str(directory / 'log'), 'wb') as log:
        process = subprocess.Popen(['sh', '-ec', commands], env=dict(os.environ, **environment),
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        support.wait_until(lambda: 'took over epoch=1' in (directory / 'log').read_text(), 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        log = (directory / 'log').read_text()
        assert 'stopped pepsi-dispatch' in log
        assert 'ok: rights: enough' in log and not re.search('^(error|warning):', log, re.MULTILINE)
    finally:
        process.kill()
        process.wait()


def test_the_statements_of_the_documents_work(mail, db):
    directory, environment = mail
    assert support.call('init', env=environment).code == 0
    with db.cursor() as cursor:
        cursor.execute(find_block('sql', 'INSERT'))
        cursor.execute("UPDATE queue SET status = 'failed', state = state || '{\"dispatch_error\": \"crash: x\"}'")
        cursor.execute(find_block('sql', 'SELECT'))
        assert cursor.fetchall() == [(1, 'count', 'failed', 'crash: x')]
        assert run_block(mail, 'pepsi-dispatch requeue').splitlines()[-1] == 'requeued 1 message'
        cursor.execute('SELECT status, state FROM queue')
        assert cursor.fetchall() == [('pending', {'file': '/etc/passwd'})]


def test_status_is_shown_as_the_readme_shows_it(mail):
    assert support.call('init', env=mail[1]).code == 0
    shown = find_block('', 'dispatcher pid').splitlines()
    status = run_block(mail, 'pepsi-dispatch status', code=1).splitlines()
    assert status[1].split() == shown[1].split()
    assert [line.split()[0] for line in status[2:-1]] == ['announce', 'count']
    assert re.sub('[0-9]+', '0', status[-1]) == re.sub('[0-9]+', '0', shown[-1])
    with support.Running(str(mail[0] / 'pepsi.conf'), env=mail[1]) as running:
        running.wait_log('took over')
        head = run_block(mail, 'pepsi-dispatch status').splitlines()[0]
    assert re.fullmatch(as_pattern(re.sub(r'[0-9]+|\bmail1\b', '%d', shown[0])), head)


def test_check_finds_what_the_readme_shows(mail, db):
    """The same lines in the same order; names, versions and numbers of the host are left out."""
    def mask(output):
        return re.sub(r'PostgreSQL .*|[0-9]+', '#', re.sub(r'/\S*/', '', output)).splitlines()
    assert support.call('init', env=mail[1]).code == 0
    db.cursor().execute("INSERT INTO queue (stage) VALUES ('bill')")
    assert mask(run_block(mail, 'pepsi-dispatch check\n')) == mask(find_block('', 'ok: configuration'))


def test_requeue_says_what_the_readme_shows(mail, db):
    assert support.call('init', env=mail[1]).code == 0
    with db.cursor() as cursor:
        cursor.execute("INSERT INTO queue (ingress_id, stage, status) SELECT id, 'count', 'failed' "
                       "FROM unnest(ARRAY[97, 194, 291, 388]) AS id")
        cursor.execute("INSERT INTO queue (ingress_id, stage, status) VALUES (3, 'announce', 'done')")
    assert run_block(mail, 'pepsi-dispatch requeue') == find_block('', 'would requeue')


def test_monitoring_describes_the_keys_and_metrics_of_status(mail):
    assert support.call('init', env=mail[1]).code == 0
    text = plain(SECTIONS['MONITORING'])
    seen = json.loads(support.call('status', '--json', env=mail[1]).out)
    with support.Running(str(mail[0] / 'pepsi.conf'), env=mail[1]) as running:
        running.wait_log('took over')
        seen['dispatcher'] = json.loads(support.call('status', '--json', env=mail[1]).out)['dispatcher']
    assert set(seen) == set(re.findall(r'^\.It Li ([a-z_]+)$', SECTIONS['MONITORING'], re.MULTILINE)[:4])
    for part in seen['dispatcher'], seen['totals'], seen['stages']['count']:
        for key in part:
            assert re.search(r'\b%s\b' % key, text), key
    prometheus = support.call('status', '--prometheus', env=mail[1]).out
    described = re.findall(r'^\.It Li (pepsi_\w+)', SECTIONS['MONITORING'], re.MULTILINE)
    assert described == re.findall(r'^# TYPE (\w+)', prometheus, re.MULTILINE)


def test_the_sql_that_is_printed_does_the_same_as_init(pg, mail, db):
    directory, environment = mail
    printed = support.call('init', '--print', env={'PEPSI_CONFIG': '/nonexistent'})
    assert printed.code == 0 and 'GRANT' in printed.out
    db.cursor().execute(printed.out)
    with support.Running(str(directory / 'pepsi.conf'), env=environment) as running:
        running.wait_log('took over epoch=1')


def test_the_stage_of_the_manual_page_is_the_library_s(dsn, db, tmp_path):
    [text] = [text for text in literals('EXAMPLES') if 'import serve' in text]
    (tmp_path / 'resize.py').write_text(text)
    config = support.write_config(tmp_path, dsn, {'resize': [sys.executable, str(tmp_path / 'resize.py')]})
    assert support.call('-c', config, 'init').code == 0
    db.cursor().execute("INSERT INTO queue (stage, state) VALUES ('resize', '{\"a\": 1}')")
    with support.Running(config, env={'PYTHONPATH': LIBRARY}) as running:
        wait_for_row(db, ('deliver', 'pending'))
        running.wait_log(r"^message 1 \{'a': 1\}$")
        running.wait_log('rows wait at stage deliver, which has no section$')


def test_the_commands_of_the_readme_are_environments_of_tox():
    parser = configparser.RawConfigParser()
    parser.read(os.path.join(ROOT, 'tox.ini'), encoding='utf-8')
    commands = [block.splitlines()[0] for block in blocks(README, 'sh') if block.startswith('python3 -m venv')]
    assert [command.split('.venv/bin/')[-1] for command in commands] == ['tox -q -e demo', 'tox']
    assert parser.get('testenv:demo', 'commands').startswith('python test/demo.py')
    [named] = re.findall(r'It ends with one line for each environment.*?\n\n', README, re.DOTALL)
    for name in set(re.findall(r'`(\w+)`', named)) - {'OK', 'SKIP', 'PATH'}:
        if 'testenv:' + name not in parser.sections():
            family, version = re.fullmatch(r'([a-z]+)(\d*)', name).groups()
            assert re.search(r'\b%s\b' % name if not version else r'%s\{[\d,]*\b%s\b' % (family, version),
                             parser.get('tox', 'envlist')), name


def test_the_output_that_the_readme_shows_is_that_of_the_demo():
    """What differs from run to run is left out: here are the words that do not."""
    shown = blocks(README, '')[0]
    demo = read('test/demo.py')
    for text in 'They agree, file by file.', 'PostgreSQL runs in ', 'queued %d messages at stage ':
        assert text in demo and re.search(as_pattern(text), shown)


def test_files_that_the_documents_name_exist():
    for name in re.findall(r'`((?:test/)?[\w.-]+\.(?:py|sh|md|1)|LICENSE)`', README):
        assert os.path.exists(os.path.join(ROOT, name)), name


def test_manual_page_has_a_date_that_man_understands():
    date = re.search(r'^\.Dd (.*)$', MAN, re.MULTILINE).group(1)
    assert time.strptime(date, '%B %d, %Y').tm_year >= 2026
