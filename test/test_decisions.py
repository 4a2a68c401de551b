"""The pure parts of the dispatcher: the worker protocol, texts, judging, cooldown, packing, outbox, statistics, timers.

Each test takes the module that it tests as a default argument: test_planted runs some of them against defects.
"""
import collections
import math
import signal

import pepsidispatch
import pytest


@pytest.fixture(autouse=True)
def nothing_left():
    """Nothing is opened or started here: spare the search for leaks."""


CONFIG = pepsidispatch.StageConfig('s', ('x',), parallelism=4, queue_limit=4, max_messages=0, pack_below_s=0.1,
                                   max_runtime_s=300.0, worker_idle_timeout_s=5.0)


class Pipe:
    """Stands in for a Child: it reads what it is told to read."""

    pids = iter(range(1, 10 ** 9))

    def __init__(self):
        self.pid = next(self.pids)
        self.stdin = self.stdout = 0
        self.waiting = b''  # in its stdin pipe, not read
        self.out = collections.deque()  # what its stdout gives, read by read
        self.takes = math.inf  # bytes that fit into the pipe
        self.signals = []

    def unread(self):
        return len(self.waiting)

    def write(self, data):
        size = int(min(len(data), self.takes))
        self.waiting += data[:size]
        return size

    def read(self):
        return self.out.popleft() if self.out else None

    def signal(self, number, group=False):
        self.signals.append((number, group))

    def close_stdin(self):
        self.stdin = None

    def reap(self):
        return 0


class Stage:
    """A pool and the workers in it, driven as the dispatcher would."""

    def __init__(self, module=pepsidispatch, **options):
        self.m = module
        self.pool = module.Pool(module.StageConfig(*CONFIG._replace(**options)))
        self.now = 100.0

    def spawn(self):
        worker = self.m.Worker(self.pool, Pipe(), self.now)
        self.pool.workers.append(worker)
        return worker

    def hand(self, worker, *ids):
        worker.hand(ids, self.now)
        worker.flush()

    def answer(self, worker, seconds=0.0):
        """The worker reads all that it has and answers its head of line after some time."""
        worker.child.waiting = b''
        self.now += seconds
        id, _, took = worker.answer(b'0', self.now)
        self.pool.passed(took, worker.answers == 1)
        return id

    def claim(self, *ids):
        """Claim these ids with all the room that there is."""
        room = self.pool.room(self.now)
        self.pool.claimed(self.pool.want(room, True), ids, room)

    def hand_out(self):
        """Hand out the ready ids; return the number of ids of each worker, in order of birth."""
        while self.pool.ready:
            worker, number = self.pool.choose(self.now)
            if not number:
                break
            worker = worker or self.spawn()
            self.hand(worker, *[self.pool.ready.popleft() for _ in range(min(number, len(self.pool.ready)))])
        return [len(w.inflight) for w in self.pool.workers]

    def make_quick(self, seconds=0.01):
        """Have one worker show that passes take this long; it stays, idle."""
        worker = self.spawn()
        for id in (1, 2):  # the first includes the program's start
            self.hand(worker, id)
            self.answer(worker, seconds)
        return worker


# -- answers -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('line, status, ident, fused, text', [
    (b'0', 0, None, (), ''),
    (b'0 id=7', 0, 7, (), ''),
    (b'0 id=9223372036854775807', 0, 2 ** 63 - 1, (), ''),
    (b'0 resize=0.25 store=1e-3', 0, None, (('resize', 0.25), ('store', 0.001)), ''),
    (b'0 id=7 a=.5 b=5. c=1E+2 d=0', 0, 7, (('a', 0.5), ('b', 5.0), ('c', 100.0), ('d', 0.0)), ''),
    (b'0 a=b=2', 0, None, (('a=b', 2.0),), ''),
    (b'0 gr\xc3\xb6\xc3\x9fe=1', 0, None, (('gr\xf6\xdfe', 1.0),), ''),
    (b'1', 1, None, (), ''),
    (b'255', 255, None, (), ''),
    (b'7 no such file', 7, None, (), 'no such file'),
    (b'7 id=3 a=1 no such file', 7, 3, (('a', 1.0),), 'no such file'),
    (b'7 id=3 no such file a=1', 7, 3, (), 'no such file a=1'),
    (b'7 a=-1 is negative', 7, None, (), 'a=-1 is negative'),
    (b'7 a=1e999 is infinite', 7, None, (), 'a=1e999 is infinite'),
    (b'7 two  blanks', 7, None, (), 'two  blanks'),
    (b'7 \xff', 7, None, (), '\ufffd'),
])
def test_a_status_line_is_read_as_the_grammar_says(line, status, ident, fused, text, m=pepsidispatch):
    assert m.parse_answer(line) == m.Answer(status, ident, fused, text)


@pytest.mark.parametrize('line', [
    b'', b' ', b'00', b'+0', b'-1', b'256', b'1000', b'01', b'0.0', b'0x1', b' 0', b'0\r', b'0\t', b'ok', b'O',
    b'\xef\xbb\xbf0', '\u0660'.encode(), '\uff11'.encode(), b'0 done', b'0 id=', b'0 id=x', b'0 id=1.5', b'0 id=7x',
    b'0 a=', b'0 =1', b'0 a=nan', b'0 a=inf', b'0 a=-1', b'0 a=+1', b'0 a=1s', b'0 a=1,5', b'0 a=1e999',
    b'0 a=1 text', b'0\x001',
    b'0 a\x01b=1', b'0 \xff=1', b'0 a=1 id=5', b'0 id=5 id=5', b'1id=2', b'0id=7', b'1\ttext',
    b'0 id=99999999999999999999999', '0 a=\u0661'.encode(),
])
def test_a_line_that_is_no_status_line_is_a_violation(line, m=pepsidispatch):
    with pytest.raises(m.Violation):
        m.parse_answer(line)


def test_a_violation_shows_the_offending_text_made_printable(m=pepsidispatch):
    with pytest.raises(m.Violation) as e:
        m.parse_answer(b'Loading\x1b[31m \xff ' + b'x' * 5000)
    assert 'Loading\\x1b[31m \\xff xxx' in str(e.value)
    assert str(e.value).isprintable() and len(str(e.value)) < 1000


def test_lines_are_cut_out_of_whatever_chunks_come(m=pepsidispatch):
    framing = m.Framing()
    assert framing.feed(b'0 i') == ([], None)
    assert framing.feed(b'd=1\n0\n\n7') == ([b'0 id=1', b'0', b''], None)
    assert framing.feed(b' bad') == ([], None)
    assert framing.feed(b'\n') == ([b'7 bad'], None)


@pytest.mark.parametrize('newline', [b'', b'\n', b'\n0\n'])
def test_a_line_longer_than_8_KiB_is_an_offence_and_what_came_before_counts(newline, m=pepsidispatch):
    assert m.Framing().feed(b'0\n' + b'1' * 8192 + newline) == (
        [b'0'] + [b'1' * 8192] * (newline != b'') + [b'0'] * (newline == b'\n0\n'), None)
    assert m.Framing().feed(b'0\n' + b'1' * 8193 + newline) == ([b'0'], b'1' * 8193)


# -- texts -------------------------------------------------------------------------------------------------------------

def test_a_reason_is_one_line_of_1000_characters_that_jsonb_and_a_terminal_take(m=pepsidispatch):
    assert m.one_line('a\r\nb\tc\x00d\u2028e\x9bf\ud800g') == 'a b c d e f g'
    assert m.one_line('  a   b ') == 'a b'
    assert len(m.one_line('\U0001f600' * 5000)) == 1000
    assert m.one_line('\n' * 2000 + 'late') == 'late'


def test_outside_text_has_no_control_characters_in_a_log_line(m=pepsidispatch):
    assert m.printable('a\nb\x1b[0m\x00\ud800') == 'a\\nb\\x1b[0m\\x00\\ud800'
    assert m.printable('x' * 500, 200) == 'x' * 199 + '\u2026'
    assert m.printable('gr\xf6\xdfe') == 'gr\xf6\xdfe'


@pytest.mark.parametrize('stage, shown', [
    ('resize', 'resize'), ('a.b/c:d@e-f+g_h', 'a.b/c:d@e-f+g_h'), ('gr\xf6\xdfe', 'gr\xf6\xdfe'),
    ('two words', '"two words"'), ('', '""'), ('a"b', '"a\\"b"'), ('a\nb', '"a\\nb"'), ('a=1', '"a=1"'),
])
def test_a_stage_that_is_not_plain_is_quoted_in_the_log(stage, shown, m=pepsidispatch):
    assert m.quoted(stage) == shown


def test_a_long_stage_is_cut_in_the_log(m=pepsidispatch):
    assert len(m.quoted('x' * 10000)) < 300


@pytest.mark.parametrize('status, text', [
    (0, 'exited with status 0'), (7 << 8, 'exited with status 7'), (signal.SIGSEGV, 'killed by SIGSEGV'),
    (signal.SIGKILL, 'killed by SIGKILL (perhaps out of memory)'), (signal.SIGSEGV | 128, 'killed by SIGSEGV'),
])
def test_the_end_of_a_worker_is_described(status, text, m=pepsidispatch):
    assert m.describe_exit(status) == text


def test_a_worker_that_we_killed_is_not_suspected_of_using_up_the_memory(m=pepsidispatch):
    assert m.describe_exit(signal.SIGKILL, True) == 'killed by SIGKILL'


# -- blame -------------------------------------------------------------------------------------------------------------

def judged(m, ids, began=True, doom=None, spared=False):
    return [(o.id, o.status.value, o.error, o.ended, o.column)
            for o in m.judge('s', ids, began, doom, 'exited with status 1', spared)]


def released(id):
    return (id, 'pending', None, False, None)


def test_a_crash_fails_the_head_of_line_and_releases_the_others(m=pepsidispatch):
    assert judged(m, [5, 6, 7]) == [(5, 'failed', 'crash: worker exited with status 1', True, 'crashes'),
                                    released(6), released(7)]


def test_a_worker_that_had_not_begun_fails_nobody(m=pepsidispatch):
    assert judged(m, [5, 6], began=False) == [released(5), released(6)]


def test_nobody_is_blamed_at_a_stop(m=pepsidispatch):
    doom = m.Doom(m.Row.TIMEOUT, 5, 'timeout: x', 'timeouts')
    assert judged(m, [5, 6], spared=True) == judged(m, [5, 6], doom=doom, spared=True) == [released(5), released(6)]


def test_the_watchdog_and_violations_blame_the_id_that_was_at_the_head_then(m=pepsidispatch):
    doom = m.Doom(m.Row.TIMEOUT, 5, 'timeout: x', 'timeouts')
    assert judged(m, [5, 6], doom=doom) == [(5, 'timeout', 'timeout: x', True, 'timeouts'), released(6)]
    doom = m.Doom(m.Row.FAILED, 5, 'protocol: x', None)
    assert judged(m, [5, 6], doom=doom, began=False)[0] == (5, 'failed', 'protocol: x', True, None)


def test_an_answer_that_came_before_the_kill_saves_the_next_head(m=pepsidispatch):
    doom = m.Doom(m.Row.TIMEOUT, 5, 'timeout: x', 'timeouts')
    assert judged(m, [6, 7], doom=doom) == [released(6), released(7)]


def test_an_idle_worker_has_nobody_to_blame(m=pepsidispatch):
    assert judged(m, []) == []
    assert judged(m, [], doom=m.Doom(m.Row.FAILED, None, 'protocol: x', None)) == []


# -- breaker -----------------------------------------------------------------------------------------------------------

def test_two_deaths_in_a_row_do_not_cool_a_stage_down_and_three_do(m=pepsidispatch):
    breaker = m.Breaker()
    assert [breaker.died(10.0, True, True) for _ in range(3)] == [False, False, True]
    assert not breaker.closed(10.9) and breaker.closed(11.0) and breaker.probing(11.0)


def test_an_answer_between_deaths_starts_the_count_again(m=pepsidispatch):
    breaker = m.Breaker()
    for _ in range(10):
        assert not breaker.died(10.0, True, True)
        assert not breaker.died(10.0, True, True)
        breaker.answered(9.0)


def test_a_worker_that_never_started_cools_the_stage_down_at_once(m=pepsidispatch):
    breaker = m.Breaker()
    assert breaker.died(10.0, False, False)
    assert not breaker.closed(10.5)


def test_a_program_that_cannot_be_started_cools_the_stage_down_at_once(m=pepsidispatch):
    breaker = m.Breaker()
    assert breaker.cannot_start(10.0)
    assert not breaker.closed(10.5)


@pytest.mark.parametrize('blamed, longest_s', [(False, 30.0), (True, 300.0)])
def test_the_cooldown_doubles_from_1_s_up_to_its_limit(blamed, longest_s, m=pepsidispatch):
    breaker, now, delays = m.Breaker(), 10.0, []
    breaker.died(now, blamed, True)
    breaker.died(now, blamed, True)
    for _ in range(100):
        breaker.died(now, blamed, True)
        delays.append(breaker.until - now)
        now = breaker.until
    assert delays[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert max(delays) == delays[-1] == longest_s


def test_deaths_of_the_same_batch_do_not_lengthen_a_cooldown(m=pepsidispatch):
    breaker = m.Breaker()
    breaker.died(10.0, False, False)
    assert not breaker.died(10.1, False, False)
    assert breaker.until == 11.0


def test_one_failed_probe_cools_the_stage_down_again(m=pepsidispatch):
    breaker = m.Breaker()
    breaker.cannot_start(10.0)
    assert breaker.died(11.0, True, True)
    assert breaker.until == 13.0


def test_the_first_answer_of_a_probe_ends_it_all(m=pepsidispatch):
    breaker = m.Breaker()
    breaker.cannot_start(10.0)
    breaker.cannot_start(11.0)
    breaker.answered(13.0)
    assert breaker.closed(13.0) and not breaker.probing(13.0)
    breaker.cannot_start(20.0)
    assert breaker.until == 21.0


def test_an_older_worker_proves_nothing_about_starting_others(m=pepsidispatch):
    breaker = m.Breaker()
    breaker.cannot_start(10.0)
    breaker.cannot_start(11.0)
    breaker.answered(5.0)
    assert breaker.closed(11.5) and not breaker.probing(11.5)
    assert breaker.spawn_at == 13.0
    breaker.cannot_start(13.0)
    assert breaker.until == 17.0


# -- pool: claims ------------------------------------------------------------------------------------------------------

def test_the_room_of_an_empty_pool_is_all_of_it(m=pepsidispatch):
    assert Stage(m).pool.room(100.0) == 16
    assert Stage(m, parallelism=0).pool.room(100.0) == 0
    assert Stage(m, max_messages=1).pool.room(100.0) == 4


def test_what_is_ready_and_in_flight_takes_room(m=pepsidispatch):
    stage = Stage(m)
    stage.hand(stage.spawn(), 1, 2, 3)
    assert stage.pool.room(100.0) == 13
    stage.claim(4, 5)
    assert stage.pool.room(100.0) == 11


def test_a_worker_that_leaves_takes_no_ids_and_keeps_its_place(m=pepsidispatch):
    stage = Stage(m, parallelism=1)
    worker = stage.spawn()
    assert stage.pool.room(100.0) == 4
    worker.leave()
    assert stage.pool.room(100.0) == 0
    other = Stage(m, parallelism=1)
    other.spawn().kill(None)
    assert other.pool.room(100.0) == 0


def test_a_worker_gets_max_messages_ids_in_its_life(m=pepsidispatch):
    stage = Stage(m, parallelism=1, max_messages=3)
    worker = stage.spawn()
    stage.hand(worker, 1, 2)
    assert stage.pool.room(100.0) == 1
    stage.answer(worker)
    assert stage.pool.room(100.0) == 1
    stage.hand(worker, 3)
    stage.answer(worker)
    assert stage.pool.room(100.0) == 0


def test_a_stage_that_cools_down_has_no_room_and_then_that_of_one_id(m=pepsidispatch):
    stage = Stage(m)
    stage.pool.breaker.cannot_start(100.0)
    assert stage.pool.room(100.9) == 0
    assert stage.pool.room(101.0) == stage.pool.worth_claiming(101.0) == 1
    stage.hand(stage.spawn(), 1)
    assert stage.pool.room(101.0) == 0


def test_no_room_for_a_probe_while_an_older_worker_has_an_id(m=pepsidispatch):
    stage = Stage(m)
    stage.hand(stage.spawn(), 1)
    stage.pool.breaker.cannot_start(100.0)
    assert stage.pool.room(101.0) == 0


def test_workers_that_may_not_be_started_yet_are_no_room(m=pepsidispatch):
    stage = Stage(m)
    stage.spawn()
    stage.pool.breaker.cannot_start(101.0)
    stage.pool.breaker.answered(100.0)
    assert stage.pool.room(101.5) == 4
    assert stage.pool.room(102.0) == 16


def test_a_claim_is_put_off_while_a_full_pool_has_but_little_room(m=pepsidispatch):
    stage = Stage(m, parallelism=1)
    worker = stage.spawn()
    stage.hand(worker, 1, 2, 3)
    assert stage.pool.worth_claiming(100.0) == 0
    stage.answer(worker)
    assert stage.pool.worth_claiming(100.0) == 2


def test_a_claim_is_not_put_off_when_a_worker_runs_dry(m=pepsidispatch):
    stage = Stage(m, parallelism=2)
    one, two = stage.spawn(), stage.spawn()
    stage.hand(one, 1, 2, 3, 4)
    stage.hand(two, 5, 6, 7)
    assert stage.pool.worth_claiming(100.0) == 0
    stage.answer(two)
    stage.answer(two)
    assert stage.pool.worth_claiming(100.0) == 3


def test_a_claim_is_not_put_off_while_a_worker_could_be_started(m=pepsidispatch):
    stage = Stage(m, parallelism=3)
    stage.hand(stage.spawn(), 1, 2, 3, 4)
    stage.hand(stage.spawn(), 5, 6, 7, 8)
    assert stage.pool.worth_claiming(100.0) == 4
    stage = Stage(m, max_messages=1)
    stage.hand(stage.spawn(), 1)
    assert stage.pool.worth_claiming(100.0) == 3


def test_a_pool_looks_at_everything_first_and_then_only_for_a_reason(m=pepsidispatch):
    pool = Stage(m).pool
    assert pool.looking
    want = pool.want(16, True)
    assert want == m.Want('s', 16, m.FIRST_ID)
    pool.claimed(want, [], 16)
    assert not pool.looking and not pool.below
    pool.look()
    assert pool.looking and pool.want(16, True).floor == m.FIRST_ID


def test_a_claim_that_came_back_full_goes_on_above_its_last_id(m=pepsidispatch):
    pool = Stage(m).pool
    pool.claimed(pool.want(3, True), [4, 5, 9], 3)
    assert pool.looking and pool.want(3, True).floor == 10


def test_a_claim_that_came_back_short_is_no_reason_to_look_and_remembers_what_it_saw(m=pepsidispatch):
    pool = Stage(m).pool
    pool.claimed(pool.want(3, True), [4, 5], 3)
    assert not pool.looking
    pool.look(8)
    assert pool.looking and pool.want(3, True).floor == 6


def test_a_claim_may_start_from_the_floor_though_something_may_stand_below(m=pepsidispatch):
    pool = Stage(m).pool
    pool.claimed(pool.want(3, True), [4, 5], 3)
    pool.look()
    want = pool.want(3, False)
    assert want.floor == 6 and pool.below
    pool.claimed(want, [], 3)
    assert not pool.looking and pool.below  # to be looked for later
    pool.look(20)
    assert pool.want(3, True).floor == m.FIRST_ID


def test_a_row_that_was_requeued_lowers_the_floor(m=pepsidispatch):
    pool = Stage(m).pool
    pool.claimed(pool.want(3, True), [4, 5, 9], 3)
    pool.look(7)
    pool.look(12)
    want = pool.want(3, True)
    assert want.floor == 7 and not pool.looking
    pool.claimed(want, [7, 12], 3)
    assert not pool.looking


def test_what_is_noted_while_a_claim_is_under_way_counts_for_the_next_one(m=pepsidispatch):
    pool = Stage(m).pool
    want = pool.want(3, True)
    pool.look(2)
    pool.claimed(want, [4], 3)
    assert pool.looking
    want = pool.want(2, True)
    assert want.floor == 2
    pool.look(3)
    pool.claimed(want, [4, 5], 2)
    want = pool.want(3, True)
    assert want.floor == 3
    pool.look()
    pool.claimed(want, [], 3)
    assert pool.looking and pool.want(3, True).floor == m.FIRST_ID


def test_ready_ids_are_ascending_whatever_claim_brought_them(m=pepsidispatch):
    stage = Stage(m)
    stage.claim(5, 9)
    stage.claim(3, 7)
    assert list(stage.pool.ready) == [3, 5, 7, 9]


def test_no_more_ids_are_kept_than_there_is_room_for_by_now(m=pepsidispatch):
    stage = Stage(m)
    stage.pool.claimed(stage.pool.want(5, True), [1, 2, 3, 4, 5], 2)
    assert list(stage.pool.ready) == [1, 2]


# -- pool: packing -----------------------------------------------------------------------------------------------------

def test_one_id_shows_the_speed_of_a_stage_and_the_others_wait_for_it(m=pepsidispatch):
    stage = Stage(m)
    stage.claim(*range(1, 11))
    assert stage.hand_out() == [1]
    stage.now += 0.05
    assert stage.hand_out() == [1]


@pytest.mark.parametrize('pack_below_s, placed', [(0.1, [1, 1, 1, 1]), (1.0, [10])])
def test_others_wait_a_tenth_of_a_second_at_most_for_the_speed_to_show(pack_below_s, placed, m=pepsidispatch):
    stage = Stage(m, queue_limit=10, pack_below_s=pack_below_s)
    stage.claim(*range(1, 11))
    stage.hand_out()
    [worker] = stage.pool.workers
    worker.child.waiting = b''  # it has begun
    worker.watch_start(stage.now)
    stage.now += 0.09
    assert stage.hand_out() == [1]
    stage.now += 0.02
    assert stage.hand_out() == placed


def test_a_program_that_is_slow_to_start_is_given_a_second(m=pepsidispatch):
    stage = Stage(m)
    stage.claim(*range(1, 5))
    stage.hand_out()
    stage.now += 0.9
    assert stage.hand_out() == [1]
    stage.now += 0.2
    assert stage.hand_out() == [1, 1, 1, 1]


def test_quick_ids_go_to_one_worker_up_to_the_limit(m=pepsidispatch):
    stage = Stage(m)
    stage.make_quick()
    stage.claim(11, 12, 13)
    assert stage.hand_out() == [3]
    stage.claim(*range(14, 20))
    assert stage.hand_out() == [4, 4, 1]


def test_slow_ids_go_to_a_worker_each_and_then_to_whoever_is_free_first(m=pepsidispatch):
    stage = Stage(m)
    stage.make_quick(0.5)
    stage.claim(11, 12, 13)
    assert stage.hand_out() == [1, 1, 1]
    stage.claim(*range(14, 19))
    assert stage.hand_out() == [1, 1, 1, 1]
    stage.answer(stage.pool.workers[2], 0.5)
    assert stage.hand_out() == [1, 1, 1, 1] and len(stage.pool.ready) == 3


def test_slow_ids_are_queued_evenly_once_all_workers_are_busy_for_long(m=pepsidispatch):
    stage = Stage(m)
    stage.make_quick(0.5)
    stage.claim(*range(11, 20))
    assert stage.hand_out() == [1, 1, 1, 1]
    for worker in stage.pool.workers:
        worker.child.waiting = b''
        worker.watch_start(stage.now)
    stage.now += m.START_S + m.FILL_S + 0.1
    assert stage.hand_out() == [3, 2, 2, 2]


def test_nobody_waits_behind_a_head_that_turns_out_slow_while_a_worker_can_be_started(m=pepsidispatch):
    stage = Stage(m)
    worker = stage.make_quick()
    stage.hand(worker, 11)
    worker.child.waiting = b''
    stage.now += 0.2
    stage.claim(12, 13)
    assert stage.hand_out() == [1, 2]


def test_ids_are_packed_behind_the_fullest_worker_that_has_room(m=pepsidispatch):
    stage = Stage(m)
    one = stage.make_quick()
    two = stage.spawn()
    stage.hand(two, 20)
    stage.answer(two)
    stage.hand(one, 11)
    stage.hand(two, 12, 13)
    stage.claim(14)
    assert stage.hand_out() == [1, 3]


def test_when_all_are_at_work_the_shortest_lines_take_what_comes(m=pepsidispatch):
    stage = Stage(m, parallelism=2)
    one = stage.make_quick()
    two = stage.spawn()
    stage.hand(two, 20)
    stage.answer(two)
    stage.hand(one, 11, 12, 13)
    stage.hand(two, 21)
    stage.claim(22, 23, 24)
    assert stage.hand_out() == [4, 3]
    stage.answer(two)
    stage.claim(25)
    assert stage.hand_out() == [4, 3]  # also when the other one is full


def test_the_youngest_idle_worker_is_taken_so_that_the_others_may_retire(m=pepsidispatch):
    stage = Stage(m)
    stage.make_quick()
    two = stage.spawn()
    stage.hand(two, 20)
    stage.answer(two)
    stage.claim(14)
    assert stage.hand_out() == [0, 1]


def test_pack_below_0_packs_never(m=pepsidispatch):
    stage = Stage(m, pack_below_s=0.0)
    stage.claim(1, 2, 3)
    assert stage.hand_out() == [1, 1, 1]


def test_no_worker_is_started_before_it_may(m=pepsidispatch):
    stage = Stage(m)
    stage.make_quick(0.5)
    stage.pool.breaker.cannot_start(stage.now)
    stage.pool.breaker.answered(0.0)
    stage.claim(11, 12)
    assert stage.hand_out() == [1]


def test_the_first_pass_of_a_worker_counts_only_if_it_was_short(m=pepsidispatch):
    stage = Stage(m)
    worker = stage.spawn()
    stage.hand(worker, 1)
    stage.answer(worker, 0.8)
    assert stage.pool.average_s is None
    stage.hand(worker, 2)
    stage.answer(worker, 0.02)
    assert stage.pool.average_s == pytest.approx(0.02)
    stage.hand(worker, 3)
    stage.answer(worker, 0.07)
    assert stage.pool.average_s == pytest.approx(0.03)


# -- worker ------------------------------------------------------------------------------------------------------------

def test_ids_handed_over_at_once_are_one_write(m=pepsidispatch):
    worker = Stage(m).spawn()
    worker.hand([1, 2 ** 63 - 1, -5], 100.0)
    assert worker.child.waiting == b''
    assert worker.flush()
    assert worker.child.waiting == b'1\n9223372036854775807\n-5\n'


def test_a_full_pipe_gets_the_rest_later(m=pepsidispatch):
    worker = Stage(m).spawn()
    worker.child.takes = 2
    worker.hand([12, 34], 100.0)
    assert [worker.flush(), worker.flush(), worker.flush()] == [False, False, True]
    assert worker.child.waiting == b'12\n34\n'


@pytest.mark.parametrize('read, began', [(0, False), (1, True), (3, True), (6, True)])
def test_a_worker_began_when_it_read_anything_of_what_is_unanswered(read, began, m=pepsidispatch):
    stage = Stage(m)
    worker = stage.spawn()
    stage.hand(worker, 12, 34)
    worker.child.waiting = worker.child.waiting[read:]
    assert worker.began() is began


def test_a_worker_that_answered_and_has_not_read_the_next_id_has_not_begun_it(m=pepsidispatch):
    stage = Stage(m)
    worker = stage.spawn()
    stage.hand(worker, 12)
    stage.answer(worker)
    stage.hand(worker, 34)
    assert not worker.began()


def test_answers_take_the_ids_in_order_and_the_time_runs_from_the_head_of_line(m=pepsidispatch):
    stage = Stage(m)
    worker = stage.spawn()
    worker.hand([1, 2], 100.0)
    assert worker.answer(b'0 id=1', 100.5)[::2] == (1, 0.5)
    assert worker.answer(b'3 id=2 no', 102.0) == (2, m.Answer(3, 2, (), 'no'), 1.5)


@pytest.mark.parametrize('line', [b'0 id=2', b'1 id=3 x', b'hello'])
def test_nothing_is_believed_after_a_violation(line, m=pepsidispatch):
    worker = Stage(m).spawn()
    worker.hand([1, 2], 100.0)
    with pytest.raises(m.Violation):
        worker.answer(line, 100.5)
    with pytest.raises(m.Violation):
        worker.answer(b'0 id=1', 100.5)
    assert list(worker.inflight) == [1, 2]
    worker.child.out.append(b'0\n')
    assert worker.receive() == ([], None)


def test_an_answer_to_nothing_is_a_violation(m=pepsidispatch):
    with pytest.raises(m.Violation):
        Stage(m).spawn().answer(b'0', 100.5)


def test_all_that_a_dead_worker_wrote_is_read(m=pepsidispatch):
    worker = Stage(m).spawn()
    worker.child.out.extend([b'0\n0', b' id=2\n1 x\nhal', b''])
    assert worker.receive(m.DRAIN_LIMIT) == ([b'0', b'0 id=2', b'1 x'], None)
    assert worker.eof


def test_one_look_at_a_worker_is_one_bounded_read(m=pepsidispatch):
    worker = Stage(m).spawn()
    worker.child.out.extend([b'0\n', b'1\n'])
    assert worker.receive() == ([b'0'], None)


def test_a_killed_worker_is_killed_with_its_group_and_keeps_the_first_reason(m=pepsidispatch):
    worker = Stage(m).spawn()
    first = m.Doom(m.Row.TIMEOUT, 5, 'timeout: x', 'timeouts')
    worker.kill(first)
    worker.kill(m.Doom(m.Row.FAILED, 5, 'protocol: x', None))
    assert worker.doom == first
    assert set(worker.child.signals) == {(signal.SIGKILL, True)}


# -- outbox ------------------------------------------------------------------------------------------------------------

def outcome(m, id, column='processed', status='FAILED'):
    return m.Outcome(id, 's', m.Row[status], 'x', column=column)


def test_outcomes_are_sent_in_id_order_and_stay_until_confirmed(m=pepsidispatch):
    outbox = m.Outbox()
    for id in (3, 1, 2):
        outbox.add(outcome(m, id))
    assert [o.id for o in outbox.take(10)] == [1, 2, 3]
    assert sorted(outbox.ids()) == [1, 2, 3] and len(outbox) == 3
    assert outbox.confirm(2) == outcome(m, 2)
    assert sorted(outbox.ids()) == [1, 3]


def test_a_settlement_is_limited(m=pepsidispatch):
    outbox = m.Outbox()
    for id in range(5):
        outbox.add(outcome(m, id))
    assert len(outbox.take(3)) == 3
    outbox.add(outcome(m, 9))
    assert sorted(outbox.ids()) == [0, 1, 2, 3, 4, 9]


def test_what_was_not_committed_is_sent_again(m=pepsidispatch):
    outbox = m.Outbox()
    outbox.add(outcome(m, 1, 'crashes'))
    outbox.take(10)
    outbox.unsent()
    assert outbox.take(10) == [outcome(m, 1, 'crashes')]


def test_what_could_not_be_written_is_put_off_longer_each_time(m=pepsidispatch):
    outbox, now, delays = m.Outbox(), 10.0, []
    outbox.add(outcome(m, 1))
    for _ in range(12):
        outbox.take(10)
        when = outbox.defer(now)
        assert outbox.due(when - 0.001) == when and not outbox.fresh
        assert outbox.due(when) == math.inf and outbox.fresh
        delays.append(when - now)
        now = when
    assert delays[:3] == pytest.approx([0.3, 0.6, 1.2])
    assert delays[-1] == pytest.approx(30.0)
    outbox.take(10)
    outbox.confirm(1)
    outbox.add(outcome(m, 1))
    outbox.take(10)
    assert outbox.defer(now) == pytest.approx(now + 0.3)


def test_a_lost_session_sends_everything_again_and_forgives_crashes(m=pepsidispatch):
    outbox = m.Outbox()
    outbox.add(outcome(m, 1))
    outbox.take(10)
    outbox.defer(10.0)
    for id, column, status in ((2, 'crashes', 'FAILED'), (3, 'timeouts', 'TIMEOUT'), (4, 'failed', 'FAILED')):
        outbox.add(outcome(m, id, column, status))
    outbox.take(10)
    outbox.add(outcome(m, 5, 'crashes'))
    outbox.lost()
    assert not outbox.sent and not outbox.deferred
    forgiven = [m.Outcome(id, 's', m.Row.PENDING, ended=False) for id in (2, 5)]
    assert outbox.take(10) == [outcome(m, 1), forgiven[0], outcome(m, 3, 'timeouts', 'TIMEOUT'),
                               outcome(m, 4, 'failed'), forgiven[1]]


# -- statistics --------------------------------------------------------------------------------------------------------

def test_statistics_count_what_ended_by_stage(m=pepsidispatch):
    stats = m.Stats()
    assert not stats
    stats.count(outcome(m, 1)._replace(seconds=2.0, fused=(('t', 0.5), ('u', 0.25))), True)
    stats.count(outcome(m, 2, 'failed')._replace(seconds=1.0), True)
    stats.count(outcome(m, 3, 'timeouts', 'TIMEOUT'), True)
    stats.count(outcome(m, 4, 'crashes'), True)
    stats.count(outcome(m, 5, None), True)  # unfinished, protocol
    stats.count(m.Outcome(6, 's', m.Row.PENDING, ended=False), True)  # released, and gone meanwhile
    stats.count(m.Outcome(7, 's', m.Row.PENDING, ended=False), False)
    assert stats.seal(9) == {'stages': ['s', 't', 'u'], 'processed': [1, 1, 1], 'failed': [1, 0, 0],
                             'timeouts': [1, 0, 0], 'crashes': [1, 0, 0], 'seconds': [3.0, 0.5, 0.25],
                             'total': 7, 'messages': 6, 'flush': 1, 'epoch': 9}


def test_a_sealed_batch_is_repeated_unchanged_until_it_is_flushed(m=pepsidispatch):
    stats = m.Stats()
    stats.count(outcome(m, 1), True)
    first = dict(stats.seal(9))
    stats.count(outcome(m, 2), True)
    assert stats.seal(9) == first
    stats.flushed()
    assert stats
    assert (stats.seal(9)['processed'], stats.seal(9)['flush']) == ([1], 2)
    stats.flushed()
    assert not stats


def test_statistics_of_messages_alone_are_flushed_too(m=pepsidispatch):
    stats = m.Stats()
    stats.count(m.Outcome(6, 's', m.Row.PENDING, ended=False), True)
    batch = stats.seal(1)
    assert (batch['stages'], batch['processed'], batch['seconds'], batch['messages']) == ([], [], [], 1)


# -- timers ------------------------------------------------------------------------------------------------------------

def test_timers_fire_once_in_the_order_of_their_deadlines(m=pepsidispatch):
    timers = m.Timers()
    for key, when in (('c', 3.0), ('a', 1.0), ('b', 2.0)):
        timers.set(key, when)
    assert timers.next() == 1.0
    assert timers.take(0.9) == []
    assert timers.take(2.0) == ['a', 'b']
    assert timers.take(2.0) == [] and timers.next() == 3.0


def test_setting_a_timer_replaces_it(m=pepsidispatch):
    timers = m.Timers()
    timers.set('a', 1.0)
    timers.set('a', 5.0)
    assert timers.next() == 5.0 and len(timers) == 1
    assert timers.take(4.0) == []
    timers.set('a', 2.0)
    assert timers.take(4.0) == ['a']
    assert timers.take(9.0) == []


def test_soonest_keeps_the_earlier_deadline(m=pepsidispatch):
    timers = m.Timers()
    timers.soonest('a', 3.0)
    timers.soonest('a', 5.0)
    assert timers.next() == 3.0
    timers.soonest('a', 2.0)
    assert timers.next() == 2.0
    timers.soonest('b', math.inf)
    assert 'b' not in timers


def test_a_cancelled_timer_does_not_fire_and_cancelling_nothing_is_no_error(m=pepsidispatch):
    timers = m.Timers()
    timers.set('a', 1.0)
    timers.cancel('a')
    timers.cancel('a')
    timers.cancel('b')
    assert timers.take(9.0) == [] and timers.next() is None
    timers.set('c', 1.0)
    timers.set('c', math.inf)
    assert 'c' not in timers and timers.next() is None
