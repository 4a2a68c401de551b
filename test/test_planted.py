"""Tests of the tests: defects planted into a copy of the dispatcher are caught, and by what.

Each defect replaces text that has to be there, breaks one promise, and names the test that has to fail then:
a test of test_decisions or test_simulation, or the generated histories. Where the defect is one of SQL it is a test of
test_queue_contract against a real PostgreSQL.
"""
import inspect
import types
from functools import partial

import pepsidispatch
import pytest
import test_decisions as decisions
import test_queue_contract as contract
import test_simulation as simulated
from simulation import play

HISTORIES = 600  # at most, until one fails

CAUGHT = AssertionError, pytest.fail.Exception  # not whatever else happens: that would be a test that is out of date

with open(pepsidispatch.__file__, encoding='utf-8') as _file:
    SOURCE = _file.read()


def plant(*replacements):
    """Return the dispatcher as a module of its own with these texts replaced; each has to be there, once."""
    source = SOURCE
    for old, new in replacements:
        assert source.count(old) == 1, 'stands there %d times:\n%s' % (source.count(old), old)
        source = source.replace(old, new)
    module = types.ModuleType('planted')
    module.__file__ = pepsidispatch.__file__
    exec(compile(source, 'planted', 'exec'), module.__dict__)
    return module


def histories(module):
    """Play generated histories until one fails."""
    for seed in range(HISTORIES):
        try:
            play(seed, module)
        except AssertionError as e:
            raise AssertionError('history %d: %s: %s' % (seed, type(e).__name__, e)) from e


DEFECTS = {
    'the whole window of a dead worker fails': (
        histories,
        ("        outcomes[0] = Outcome(ids[0], stage, Row.FAILED, 'crash: worker ' + how, column='crashes')",
         "        outcomes = [Outcome(i, stage, Row.FAILED, 'crash: worker ' + how, column='crashes') for i in ids]")),
    'a worker that never began is blamed': (
        simulated.test_a_worker_that_died_before_it_read_anything_fails_nobody,
        ('judge(stage, list(worker.inflight), began and not outage,',
         'judge(stage, list(worker.inflight), not outage,')),
    'a crash during an outage is blamed': (
        partial(simulated.crashing, seconds=0.05),
        ('judge(stage, list(worker.inflight), began and not outage,', 'judge(stage, list(worker.inflight), began,')),
    'a crash that was not written before an outage is blamed': (
        decisions.test_a_lost_session_sends_everything_again_and_forgives_crashes,
        ("            if outcome.column == 'crashes':\n", "            if outcome.column == 'crash':\n")),
    'a stop is blamed on messages': (
        simulated.test_nobody_is_blamed_for_a_stop,
        ('    if not ids or spared:\n', '    if not ids:\n')),
    'the pipe of a dead worker is not drained': (
        simulated.test_what_a_worker_wrote_before_it_died_counts,
        ('self.inbox.append(Died(worker, status, *worker.receive(DRAIN_LIMIT)))',
         'self.inbox.append(Died(worker, status, [], None))')),
    'deadlines are judged before answers are read': (
        simulated.test_an_answer_that_is_there_beats_the_watchdog,
        ('        self._heard(Heard(worker, *worker.receive()))  # I4\n', ''),
        ('        inbox, self.inbox = self.inbox, []\n',
         '        for key in [k for w, k in self.timers.pending() if w <= self.now and isinstance(k, tuple)]:\n'
         '            self.timers.cancel(key)\n'
         '            self._due[key[0]](key[1])\n'
         '        inbox, self.inbox = self.inbox, []\n')),
    'an answer with the wrong id is taken': (
        histories,
        ('        if answer.id is not None and answer.id != self.inflight[0]:\n', '        if False:\n')),
    'a worker is trusted after a violation': (
        partial(decisions.test_nothing_is_believed_after_a_violation, line=b'hello'),
        ('        self._trusted = False\n        answer = PLAIN_SUCCESS', '        answer = PLAIN_SUCCESS')),
    'an id in the outbox is not held': (
        histories,
        ('        ids = list(self.outbox.ids())\n        ids.extend(self._resting)\n',
         '        ids = list(self._resting)\n')),
    'an id in flight is not held': (
        histories,
        ('            ids.extend(worker.inflight)\n        return ids\n',
         '                pass\n        return ids\n')),
    'a claimed id that waits is not held': (
        histories,
        ('            ids.extend(pool.ready)\n', '            pass\n')),
    'outcomes on their way are dropped when the session is lost': (
        partial(simulated.failing, name='settle', fate='before'),
        ('        self.unsent()\n        self.due(math.inf)\n',
         '        self.sent = {}\n        self.due(math.inf)\n')),
    'outcomes of a statement that failed are dropped': (
        decisions.test_what_was_not_committed_is_sent_again,
        ('        self.fresh.update(self.sent)\n', '')),
    'outcomes that were put off are never sent': (
        partial(simulated.delayed, trouble='locked'),
        ("            self.timers.set('resend', self.outbox.defer(self.now))\n",
         '            self.outbox.defer(self.now)\n')),
    'statistics are added twice after an unknown commit': (
        histories,
        ('        if not self.sealed:\n            self.flush += 1\n',
         '        self.flush += 1\n'
         '        if self.sealed:\n'
         "            self.sealed['flush'] = self.flush\n"
         '        else:\n'),
        ("        elif self.stats.sealed and self.stats.sealed['flush'] <= fact.flush:\n", '        elif False:\n')),
    'what is counted while statistics are flushed is lost': (
        decisions.test_a_sealed_batch_is_repeated_unchanged_until_it_is_flushed,
        ('        """The sealed batch is in the database."""\n',
         '        """The sealed batch is in the database."""\n        self._clear()\n')),
    'an unfinished pass counts as processed': (
        simulated.test_a_pass_that_changes_nothing_fails_as_unfinished,
        ('                    outcome = outcome._replace(column=None)\n', '                    pass\n')),
    'the watchdog is not armed anew for the next head of line': (
        simulated.test_the_watchdog_is_armed_anew_for_each_head_of_line,
        ("            self.timers.set(('watchdog', pid), worker.head_since + limit_s)\n", '            pass\n')),
    'the heartbeat beats once': (
        simulated.test_rows_without_an_owner_are_reset_at_start_and_at_the_heartbeat,
        ("        self.timers.set('heartbeat', self.now + max(self.config.poll_interval_s, LEAST_INTERVAL_S))\n", '')),
    'a worker that leaves is given no grace period to end': (
        simulated.test_a_worker_that_ignores_end_of_file_is_killed_after_the_grace,
        ("        self.timers.set(('grace', worker.pid), self.now + self.config.stop_timeout_s)\n", '')),
    'the end of a cooldown is not noticed': (
        simulated.test_a_missing_program_fails_nobody_and_recovers_at_the_next_probe,
        ("        self.timers.set(('cooldown', stage), pool.breaker.until)\n", '')),
    'nothing wakes when others may be started again': (
        simulated.test_a_second_worker_is_started_as_soon_as_it_may_be,
        ("            self.timers.set(('cooldown', pool.config.name), pool.breaker.spawn_at)",
         "            self.timers.cancel(('cooldown', pool.config.name))")),
    'timers of a dead worker stay': (
        histories,
        ("        for kind in ('watchdog', 'idle', 'grace', 'eof'):\n",
         "        for kind in ('watchdog', 'idle', 'eof'):\n")),
    'a notification during a statement is swallowed': (
        simulated.test_a_row_that_is_inserted_while_a_statement_is_under_way_is_claimed,
        ('        if calls:\n', '        if calls and not self.queue.busy():\n')),
    'outcomes wait for others that do not come': (
        simulated.test_what_has_ended_is_written_soon_though_others_work_on,
        ("        self.timers.soonest('gather', when)\n", '')),
    'nobody looks while those who insert are silent': (
        simulated.test_where_notifications_come_thick_it_looks_by_itself_until_they_do_not,
        ("            self.timers.soonest('peek', self.now + LOOK_GAP_S[0])\n", '            pass\n')),
    'those who insert stay silent for ever': (
        simulated.test_where_notifications_come_thick_it_looks_by_itself_until_they_do_not,
        ('            self._hush = self._came / HUSH_S >= THICK / THICK_S', '            pass')),
    'nobody looks after a reconnect': (
        simulated.test_a_row_that_is_inserted_while_the_database_is_away_is_claimed_when_it_is_back,
        ('        self._called()  # for what came while nobody notified, or before this session\n', '')),
    'a locked row is passed over and forgotten': (
        simulated.test_a_locked_row_delays_no_other_and_is_claimed_soon_after_it_is_free,
        ("            self.timers.soonest('locked', self.now + SKIP_LOCKED_S)\n", '            pass\n')),
    'a requeued row below the floor is not looked for': (
        decisions.test_a_row_that_was_requeued_lowers_the_floor,
        ('            self.floor = min(self.floor, id)\n', '')),
    'what is noted while a claim is under way is forgotten': (
        decisions.test_what_is_noted_while_a_claim_is_under_way_counts_for_the_next_one,
        ('            self._noted = min(self._noted, id)\n', '')),
    'rows are swept while workers of an earlier dispatcher live': (
        simulated.test_nothing_is_reset_before_the_workers_of_an_earlier_dispatcher_are_gone,
        ('        self._alone = not survivors\n', '        self._alone = True\n')),
    'nothing is swept after the session was lost': (
        partial(simulated.failing, name='claim', fate='after'),
        ('        self._swept = False\n        self.outbox.lost()\n', '        self.outbox.lost()\n'),
        ("        self._holder = ''\n        self._swept = False\n", "        self._holder = ''\n")),
    'the breaker never trips': (
        decisions.test_two_deaths_in_a_row_do_not_cool_a_stage_down_and_three_do,
        ('        if started and self.deaths < DEATHS_IN_A_ROW and not self.cooling:\n            return False\n'
         '        return self._open(now, blamed)\n', '        return False\n')),
    'a stage in cooldown claims': (
        histories,
        ('        if not self.breaker.closed(now):\n            return 0\n', '')),
    'a probe is not limited to one id': (
        histories,
        ('        if self.breaker.probing(now):\n            free =', '        if False:\n            free =')),
    'ids that a claim brought too many are dropped': (
        simulated.test_what_a_claim_brings_after_a_stop_is_given_back,
        ('            for id in mine[room:]:', '            for id in []:')),
    'ids that are ready are not given back at a stop': (
        histories,
        ('        for pool in self.pools.values():\n            self._give_back(pool)\n        for worker in',
         '        for worker in')),
    'a message may enter its own stage again at once': (
        simulated.test_a_message_that_enters_its_own_stage_again_and_again_does_so_at_a_low_rate,
        ("        self.timers.set(('rest', id), self.now + RETRY_GAP_S)\n",
         "        self.timers.set(('rest', id), self.now)\n")),
    'a burst of notifications is a burst of claims': (
        simulated.test_an_empty_claim_causes_no_claim_and_a_burst_of_notifications_few,
        ('        if self._empty_claims > 1:\n', '        if False:\n')),
    'an empty claim causes the next': (
        simulated.test_an_empty_claim_causes_no_claim_and_a_burst_of_notifications_few,
        ('        if len(ids) >= want.cap:\n            self.looking = True\n',
         '        self.looking = True\n        if False:\n            pass\n')),
    'the due time of a paused row is not learned': (
        simulated.test_a_paused_row_is_retried_when_it_is_due,
        ('            if next_s is not None:\n', '            if False:\n')),
    'a worker gets more ids than its allowance': (
        histories,
        ('        return room if room < rest else rest\n',
         '        return room\n')),
    'a descriptor is closed while the selector has it': (
        histories,
        ('        self._unwatch(worker.child.stdout)\n        worker.child.close_stdin()\n',
         '        worker.child.close_stdin()\n')),
    'only the worker is killed, not its group': (
        decisions.test_a_killed_worker_is_killed_with_its_group_and_keeps_the_first_reason,
        ('        self.state = WorkerState.KILLED\n        self.child.signal(signal.SIGKILL, group=True)\n',
         '        self.state = WorkerState.KILLED\n        self.child.signal(signal.SIGKILL)\n')),
    'what a full pipe did not take is dropped': (
        histories,
        ('            self.pending = self.pending[written:]\n', "            self.pending = b''\n")),
    'a second TERM waits as well': (
        simulated.test_a_second_term_kills_at_once,
        ("                log.info('stopping at once on a second %s', name)\n                self._kill_all()\n",
         "                log.info('stopping at once on a second %s', name)\n")),
    'a claim waits until half of the pool is free': (
        decisions.test_a_claim_is_not_put_off_while_a_worker_could_be_started,
        ('        return room if dry or startable else 0\n', '        return room if dry else 0\n')),
    'everything is packed onto one worker': (
        simulated.test_few_workers_do_quick_work_and_all_do_slow_work,
        ('        return self.average_s < self.config.pack_below_s\n', '        return True\n')),
    'nothing is packed': (
        simulated.test_few_workers_do_quick_work_and_all_do_slow_work,
        ('        return self.average_s < self.config.pack_below_s\n', '        return False\n')),
    'a replaced dispatcher goes on': (
        simulated.test_a_dispatcher_that_was_replaced_kills_its_workers_and_touches_nothing,
        ('        self._abandon(EXIT_RUNNING)\n\n    def _failed', '\n    def _failed')),
    'a cancelled timer fires': (
        decisions.test_a_cancelled_timer_does_not_fire_and_cancelling_nothing_is_no_error,
        ('        """Forget `key`."""\n        self._when.pop(key, None)\n', '        """Forget `key`."""\n')),
}


@pytest.mark.parametrize('name', sorted(DEFECTS))
def test_a_planted_defect_is_caught(name):
    catch, *replacements = DEFECTS[name]
    module = plant(*replacements)
    argument = 'm' if 'm' in inspect.signature(catch).parameters else 'module'
    with pytest.raises(CAUGHT) as e:
        catch(**{argument: module})
    print('caught by %s: %s' % (getattr(catch, 'func', catch).__name__, str(e.value)[:200]))


# -- SQL, against a real PostgreSQL ------------------------------------------------------------------------------------

SQL_DEFECTS = {
    'an outcome is written whatever the stage is now': (
        contract.test_a_row_that_runs_at_another_stage_has_advanced_whatever_the_outcome_says,
        ("CASE WHEN q.stage = f.claimed THEN f.verdict ELSE 'pending' END", 'f.verdict')),
    'an outcome is written whatever the status is now': (
        partial(contract.test_a_row_that_does_not_run_is_left_alone_and_reported, status='done'),
        ("WHERE f.status = 'running' AND q.ingress_id = f.id AND q.status || '' = 'running'",
         'WHERE q.ingress_id = f.id')),
    'a reason is written to a row that has advanced': (
        contract.test_a_row_that_runs_at_another_stage_has_advanced_whatever_the_outcome_says,
        ('WHEN f.error IS NULL OR q.stage IS DISTINCT FROM f.claimed THEN q.state',
         'WHEN f.error IS NULL THEN q.state')),
    'an outcome that meets a lock is not written around it': (
        contract.test_an_outcome_of_a_locked_row_is_not_confirmed_and_the_others_are,
        ('        FOR UPDATE OF q SKIP LOCKED\n', '')),
    'a claim takes what is held': (
        contract.test_a_claim_takes_nothing_below_its_floor_and_nothing_held,
        ('          AND q.ingress_id >= s.floor\n          AND q.ingress_id <> ALL (%(held)s::bigint[])\n',
         '          AND q.ingress_id >= s.floor AND %(held)s::bigint[] IS NOT NULL\n')),
    'a claim takes what is below its floor': (
        contract.test_a_claim_takes_nothing_below_its_floor_and_nothing_held,
        ('          AND q.ingress_id >= s.floor\n', '')),
    'a claim takes more than its cap': (
        contract.test_a_claim_takes_the_lowest_pending_ids_of_each_stage_up_to_its_cap,
        ('        LIMIT s.cap\n    ) AS p))\n', '        LIMIT s.cap + 1\n    ) AS p))\n')),
    'a claim that meets a lock takes nothing': (
        contract.test_a_locked_row_is_passed_over_and_the_session_says_so,
        ("CLAIM.replace('LIMIT s.cap', 'LIMIT s.cap\\n        FOR UPDATE SKIP LOCKED')", 'CLAIM')),
    'a sweep resets what is held': (
        contract.test_a_sweep_resets_running_rows_that_are_not_held_at_any_stage,
        ("q.status || '' = 'running'\n      AND q.ingress_id <> ALL (%(held)s::bigint[])\n",
         "q.status || '' = 'running'\n")),
    'a row that is held is retried': (
        contract.test_due_rows_become_pending_and_the_next_due_time_is_told,
        ("\n    WHERE q.status = 'paused' AND q.timeout <= now() AND q.ingress_id <> ALL (%(held)s::bigint[])\n",
         "\n    WHERE q.status = 'paused' AND q.timeout <= now()\n")),
    'the next due time is that of a row that is held': (
        contract.test_due_rows_become_pending_and_the_next_due_time_is_told,
        ("q.timeout < 'infinity'\n      AND q.ingress_id <> ALL (%(held)s::bigint[])\n", "q.timeout < 'infinity'\n")),
    'rows are reset without a sweep': (
        contract.test_without_a_sweep_no_running_row_is_touched,
        ('\n    WHERE %(sweep)s AND upper(q.status)', '\n    WHERE upper(q.status)')),
    'statistics are added twice': (
        contract.test_a_batch_of_statistics_is_added_once, (' AND flush < %(flush)s', '')),
    'statistics of an older dispatcher are added': (
        contract.test_a_batch_of_another_epoch_is_not_added, ('WHERE epoch = %(epoch)s AND flush', 'WHERE flush')),
    'the dispatcher wakes itself up': (
        contract.test_nothing_that_the_session_does_rings,
        ("                AND current_setting('pepsi.dispatcher', true) IS DISTINCT FROM 'on')\n",
         '                )\n'),
        ('self.rung += notify.pid != self.own', 'self.rung += 1')),
    'a notification that comes in one read with a reply is missed': (
        contract.test_a_notification_that_comes_right_behind_a_reply_rings,
        ('        lost = None\n        try:\n            self._conn.poll()\n',
         '        lost = None\n        try:\n            pass\n')),
    'a lock that may be held is forgotten': (
        contract.test_a_hush_that_fails_may_have_been_heard,
        ('before, self.hushes, self._unheard = self._unheard, True, True', 'before = self._unheard')),
    'a reply is lost with the session that brought it': (
        contract.test_a_reply_that_comes_right_before_the_end_of_the_session_counts,
        ('            lost = e\n', '            return self._failed(e)\n')),
    'a transaction that is silent is not waited for': (
        contract.test_notifications_are_not_waited_for_before_the_last_silent_transaction_has_ended,
        ('IF NOT pg_try_advisory_xact_lock_shared(%(silent)d)\n       OR ', 'IF ')),
    'who inserts is silent though somebody waits for the last of them': (
        contract.test_while_it_is_asked_for_the_end_of_silent_transactions_all_others_notify,
        ('IF NOT pg_try_advisory_xact_lock_shared(%(silent)d)\n       OR ',
         'PERFORM pg_try_advisory_xact_lock_shared(%(silent)d); IF ')),
    'an ordinary update by a worker wakes the dispatcher': (
        contract.test_an_insert_and_a_change_of_a_row_that_does_not_run_ring,
        ("NEW.status IN ('pending', 'paused') AND OLD.status <> 'running'", "NEW.status IN ('pending', 'paused')")),
}


@pytest.mark.parametrize('name', sorted(SQL_DEFECTS))
def test_a_defect_planted_into_a_statement_is_caught(name, dsn, monkeypatch):
    catch, *replacements = SQL_DEFECTS[name]
    monkeypatch.setattr(contract, 'm', plant(*replacements))
    with contract.connected(dsn) as ready, pytest.raises(CAUGHT) as e:
        catch(ready)
    print('caught by %s: %s' % (getattr(catch, 'func', catch).__name__, str(e.value)[:200]))
