"""What must be true after a run with faults: nothing is lost, nothing runs twice at once, the right message is blamed.

Pure: compares what was planned for each message with its row, with the effects that its passes committed, with the
execution log of the stages and with what was done to the system meanwhile. Every check returns complaints, one line
each.
"""
import collections
import json
from typing import Any, NamedTuple

Event = collections.namedtuple('Event', 'time pid stage id what')

# What an incident explains. It concerns the executions that it met: they had begun, and had not begun again, when it
# happened.
REPEATS = 'repeats'  # they may have been executed once more
DEAD = 'dead'  # ... if they did not end
CRASH = 'crash'  # the head of line of each of its pids may have failed with 'crash:'
UNCOUNTED = 'uncounted'  # what ended within it is perhaps in no statistics


class Incident(NamedTuple):
    """Something that was done to the system, from a monotonic instant to another."""
    kind: str
    begin: float
    end: float
    explains: frozenset = frozenset()
    ids: Any = None  # the messages that it concerns; None: all
    pids: Any = ()  # the workers that it killed; None: of some it took the database, and they gave up by themselves


class Plan(NamedTuple):
    """What is to become of a message."""
    effects: Any = ()  # the stages of the passes that commit, in order
    final: Any = ('done',)  # statuses; None in it: the row may be gone
    error: str = ''  # how dispatch_error begins; '': there is none
    failing: str = ''  # the stage whose pass ends without a commit
    fused: Any = ()  # stages that were reported as fused
    loose: bool = False  # somebody else touched it: its effects are some of those planned, each at most once more


class Life(NamedTuple):
    """One execution of a message by a stage."""
    id: int
    stage: str
    pid: int
    begin: float
    commit: Any  # monotonic; None: nothing was committed, as far as the log knows
    end: Any  # None: it died with it


def read_log(path):
    """Return the events of an execution log in the order of writing. What a killed process left half-written is no line
    of its own: each event is one write."""
    with open(path, encoding='utf-8') as file:
        return [Event(*json.loads(line)) for line in file if line.endswith('\n')]


def find_lives(events):
    """Return the executions in the log, in the order of their begins."""
    lives, current = [], {}
    for event in events:
        if event.what == 'begin':
            current[event.pid] = len(lives)
            lives.append(Life(event.id, event.stage, event.pid, event.time, None, None))
        elif event.what in ('commit', 'end') and event.pid in current:
            at = current[event.pid]
            lives[at] = lives[at]._replace(**{event.what: event.time})
    return lives


def check_twice(events, lives):
    """Nothing runs twice at once: no execution begins while another one of the same message is under way."""
    bad = ['message %d was executed twice at once: by %d at %s, %.3f' % (e.id, e.pid, e.stage, e.time)
           for e in events if e.what == 'double']
    last = {}
    for life in lives:
        before = last.get(life.id)
        if before is not None and before.end is not None and before.end > life.begin:
            bad.append('message %d was executed twice at once: %s and %s' % (life.id, before, life))
        last[life.id] = life
    return bad


def check_rows(plans, rows):
    """Nothing is lost: every message has the status that it was to have. rows: id -> (stage, status, error)."""
    bad = []
    for id, plan in plans.items():
        stage, status, error = rows.get(id, (None, None, None))
        if status not in plan.final:
            bad.append('message %d is %s at %s instead of %s: %s' % (id, status, stage, '/'.join(map(str, plan.final)),
                                                                     error))
    return bad


def check_blame(plans, rows, lives, incidents):
    """The right message is blamed: who failed was to fail, for that reason, or was at the head of a worker that was
    killed. And of each killed worker one message is blamed at most.

    Returns complaints and the set of those that failed for no fault of theirs.
    """
    bad, killed, blamed = [], {}, set()
    last = {}
    for life in lives:
        last[life.pid] = life
    bereft = [i for i in incidents if CRASH in i.explains and i.pids is None]
    for incident in incidents:
        if CRASH in incident.explains:
            killed.update((pid, None) for pid in incident.pids or ())
    gave_up = {life.id for life in lives for i in bereft if life.begin <= i.end and (life.end or i.begin) >= i.begin}
    open_ids = {last[pid].id: pid for pid in killed if pid in last and last[pid].end is None}
    between = [pid for pid in killed if pid not in last or last[pid].end is not None]
    for id, (stage, status, error) in sorted(rows.items()):
        plan = plans.get(id, Plan())
        if not error and not (plan.error and status in ('failed', 'timeout')):
            continue
        if plan.error and (error or '').startswith(plan.error):
            continue
        if plan.error and plan.loose:
            continue
        blamed.add(id)
        if (error or '').startswith('crash: ') and id in open_ids:
            del open_ids[id]
        elif error == 'crash: worker exited with status 1' and id in gave_up:
            gave_up.remove(id)
        elif (error or '').startswith('crash: ') and between:
            between.pop()  # it was killed between reading the id and the log, or between the log and the answer
        else:
            blamed.remove(id)
            bad.append('message %d is %s at %s: %r, planned was %r' % (id, status, stage, error, plan.error))
    return bad, blamed


def check_effects(plans, effects):
    """Every pass took effect once. effects: [(id, stage)] of what the passes committed, in any order."""
    bad, found = [], collections.defaultdict(list)
    for id, stage in effects:
        found[id].append(stage)
    for id, plan in plans.items():
        have, want = sorted(found.get(id, ())), sorted(plan.effects)
        if plan.loose:
            over = collections.Counter(have) - collections.Counter(want)
            if over:
                bad.append('message %d had effect at %s more than planned' % (id, dict(over)))
        elif have != want:
            bad.append('message %d had effect at %s instead of %s' % (id, have, want))
    return bad


def explain(first, second, incidents):
    """Return the incident that explains that the execution `first` was followed by `second` at the same stage.

    What was committed is repeated only where somebody did something to just that message.
    """
    for incident in incidents:
        if first.commit is not None if incident.ids is None else first.id not in incident.ids:
            continue
        if incident.begin <= second.begin and incident.end >= first.begin and (
                REPEATS in incident.explains or (DEAD in incident.explains and first.end is None)):
            return incident
    return None


def check_repeats(plans, lives, incidents):
    """Every execution beyond the planned ones has its reason."""
    bad, count = [], collections.Counter()
    last = {}
    for life in lives:
        key = life.id, life.stage
        plan = plans.get(life.id, Plan())
        before = last.get(key)
        last[key] = life
        if before is None:
            continue
        if before.commit is not None and list(plan.effects).count(life.stage) > 1:
            continue  # it came back, as planned
        reason = explain(before, life, incidents)
        if reason is None:
            bad.append('message %d was executed again without a reason: %s after %s' % (life.id, life, before))
        else:
            count[reason.kind] += 1
    return bad, count


def check_statistics(plans, lives, effects, incidents, stats, totals, rows):
    """The statistics are those of the log, less what killed dispatchers had not written yet.

    stats: stage -> (processed, failed, timeouts, crashes); totals: (stages, messages).
    """
    bad = []
    lost = [i for i in incidents if UNCOUNTED in i.explains]

    def uncounted(life):
        return any(i.begin <= (life.end or life.begin) <= i.end or i.begin <= life.begin <= i.end for i in lost)

    committed, least = collections.Counter(stage for _, stage in effects), collections.Counter()
    ended, doubtful, died = collections.Counter(), collections.Counter(), collections.Counter()
    for life in lives:
        plan = plans.get(life.id, Plan())
        fused = plan.fused if life.stage == 'a' else ()
        if life.end is None:
            died[life.stage] += 1
            if life.commit is not None:
                doubtful[life.stage] += 1
        if life.end is not None or life.commit is not None:
            ended[life.stage] += 1
            ended.update(fused)
        if uncounted(life):
            doubtful[life.stage] += 1
            doubtful.update(fused)
    for id, plan in plans.items():
        if plan.loose:
            doubtful.update(plan.effects)
        committed.update(plan.fused if (rows.get(id, (0, 0))[1] is not None) else ())
    least = committed - doubtful
    for stage in sorted(set(committed) | set(stats)):
        processed, failed, timeouts, crashes = stats.get(stage, (0, 0, 0, 0))
        if not least[stage] <= processed <= ended[stage]:
            bad.append('stage_stats: %s processed %d, the log says %d to %d'
                       % (stage, processed, least[stage], ended[stage]))
        if failed + processed > ended[stage]:
            bad.append('stage_stats: %s processed %d and failed %d, but only %d executions ended'
                       % (stage, processed, failed, ended[stage]))
        if timeouts + crashes > died[stage] + sum(len(i.pids or ()) for i in incidents):
            bad.append('stage_stats: %s timeouts %d and crashes %d, but only %d executions died'
                       % (stage, timeouts, crashes, died[stage]))
    final = [id for id, (_, status, _) in rows.items() if status not in ('pending', 'running', 'paused')]
    gone = [id for id in plans if id not in rows]
    left = len(final) + len(gone)
    loose = sum(plan.loose for plan in plans.values())
    if not left - loose - sum(doubtful.values()) <= totals[1] <= left + loose:
        bad.append('dispatch_stats: %d messages left, of %d (%d touched by others, %d in doubt)'
                   % (totals[1], left, loose, sum(doubtful.values())))
    counted = sum(sum(columns) for columns in stats.values())
    if totals[0] < counted:
        bad.append('dispatch_stats: %d stages are fewer than the %d of stage_stats' % (totals[0], counted))
    return bad
