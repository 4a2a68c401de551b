"""pepsi.conf: from its text to values, warnings and errors."""
import math
import os

import pepsidispatch as m
import pytest

FILE = '/etc/pepsi/pepsi.conf'
STAGE = '[stage-a]\nPROGRAM = x\n'


@pytest.fixture(autouse=True)
def nothing_left():
    """Nothing is opened or started here: spare the search for leaks."""


def parse(*lines):
    return m.parse_config('\n'.join(lines), FILE)


def get_errors(*lines):
    """Return the lines of the error; there has to be one."""
    with pytest.raises(m.Failure) as e:
        parse(*lines)
    assert e.value.code == 78
    assert all(line.startswith(FILE) and line.isprintable() for line in e.value.lines)
    return list(e.value.lines)


# -- values ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('text, seconds', [
    ('5', 5.0), ('0.5', 0.5), ('.5', 0.5), ('5.', 5.0), ('1.5 h', 5400.0), ('250ms', 0.25), ('250 ms', 0.25),
    ('3 s', 3.0), ('300 seconds', 300.0), ('1 second', 1.0), ('5 min', 300.0), ('5min', 300.0), ('5 minutes', 300.0),
    ('1 minute', 60.0), ('2 h', 7200.0), ('2 hours', 7200.0), ('1 d', 86400.0), ('2 days', 172800.0),
    ('1 day', 86400.0), ('20 milliseconds', 0.02), ('5 MIN', 300.0), (' 5\ts ', 5.0),
    ('forever', math.inf), ('Forever', math.inf),
])
def test_a_time_is_a_number_with_a_unit_or_seconds(text, seconds):
    assert m.parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize('text', [
    '', ' ', 's', '-1', '+1', '1e3', '1,5 s', '1.5.2', '5 m', '5 M', '5 weeks', '5 s s', '5 s 3 ms', '0x10', 'nan',
    'inf', 'infinity', 'never', '\u0665', '5 \u017f', '1_000', 'forever 5', '0', '0 s', '0.000 h',
    '9' * 400, '0.' + '0' * 400 + '1',
])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError):
        m.parse_time(text)


def test_zero_and_forever_are_times_only_where_they_make_sense():
    assert m.parse_time('0', zero=True) == m.parse_time('0 ms', zero=True) == 0
    with pytest.raises(ValueError):
        m.parse_time('forever', forever=False)


@pytest.mark.parametrize('text', ['', '-1', '+1', '1.0', '1e3', 'x', '\u0661', '1 000', '0', '6', '9' * 30])
def test_what_is_no_count_in_its_range_is_refused(text):
    with pytest.raises(ValueError):
        m.parse_count(text, 1, 5)


def test_a_program_is_split_as_a_shell_would():
    assert m.parse_program('ssh -T host \'my prog\' "a b"\\ c') == ('ssh', '-T', 'host', 'my prog', 'a b c')
    assert m.parse_program('/opt/50%/$HOME') == ('/opt/50%/$HOME',)


@pytest.mark.parametrize('text', ['', '  ', "''", '"', "it's", 'a\\', 'a\0b'])
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ValueError):
        m.parse_program(text)


# -- defaults ----------------------------------------------------------------------------------------------------------

def test_the_defaults_are_those_that_are_documented():
    assert parse(STAGE)._replace(sources=()) == m.Config(
        FILE, '', 30.0, 60.0, 5.0, FILE,
        {'a': m.StageConfig('a', ('x',), 4, 4, 1000, 0.1, 300.0, 5.0)}, ())


def test_every_option_is_read():
    config = parse('[pepsi]', 'DATABASE = host=h dbname=d', '[pepsi-dispatch]', 'MAX_RUNTIME = 1 h',
                   'WORKER_IDLE_TIMEOUT = 0', 'POLL_INTERVAL = 2', 'STATS_INTERVAL = 3',
                   'STOP_TIMEOUT = 4', 'CONFIG_FILE = other.conf', '[stage-a]', 'PROGRAM = p -x',
                   'PARALLELISM = 1', 'QUEUE_LIMIT = 2', 'MAX_MESSAGES = 3', 'PACK_BELOW = 4 ms')
    assert config._replace(sources=()) == m.Config(
        FILE, 'host=h dbname=d', 2.0, 3.0, 4.0, 'other.conf',
        {'a': m.StageConfig('a', ('p', '-x'), 1, 2, 3, 0.004, 3600.0, 0.0)}, ())


def test_where_each_value_comes_from_is_remembered_without_the_password():
    sources = parse('[pepsi]', 'DATABASE = host=h password=hunter2', '[stage-a]', 'PROGRAM = x',
                    'queue_limit = 2').sources
    assert ('pepsi-dispatch', 'POLL_INTERVAL', '30 s', 'default') in sources
    assert ('stage-a', 'QUEUE_LIMIT', '2', FILE) in sources
    assert 'hunter2' not in str(sources)


def test_a_stage_overrides_what_holds_for_all():
    config = parse('[stage-a]', 'PROGRAM = x', 'MAX_RUNTIME = 1 s', 'WORKER_IDLE_TIMEOUT = forever', '[stage-b]',
                   'PROGRAM = x', '[pepsi-dispatch]', 'MAX_RUNTIME = 2 s', 'WORKER_IDLE_TIMEOUT = 3 s')
    assert [(s.max_runtime_s, s.worker_idle_timeout_s) for s in config.stages.values()] == [(1.0, math.inf), (2.0, 3.0)]


def test_workers_get_the_absolute_path_of_the_file_that_was_read():
    assert m.parse_config(STAGE, 'sub/pepsi.conf').config_file == os.path.abspath('sub/pepsi.conf')
    assert m.parse_config(STAGE + '[pepsi-dispatch]\nCONFIG_FILE =', '/x').config_file == '/x'


@pytest.mark.parametrize('option, zero, forever', [
    ('POLL_INTERVAL', False, True), ('STATS_INTERVAL', False, True), ('MAX_RUNTIME', False, True),
    ('WORKER_IDLE_TIMEOUT', True, True), ('STOP_TIMEOUT', True, False)])
def test_only_some_times_may_be_zero_or_forever(option, zero, forever):
    for value, fine in (('0', zero), ('forever', forever)):
        lines = STAGE, '[pepsi-dispatch]', '%s = %s' % (option, value)
        if fine:
            parse(*lines)
        else:
            assert get_errors(*lines)


@pytest.mark.parametrize('option, fine, wrong', [
    ('PARALLELISM', ['0', '1', '64'], ['-1', '1.5', 'x', '']),
    ('QUEUE_LIMIT', ['1', '1000'], ['0', '1001', '-1', 'many']),
    ('MAX_MESSAGES', ['0', '1', '1000000'], ['-1', 'never', '1.5']),
    ('PACK_BELOW', ['0', '100 ms', 'forever'], ['-1 s', 'x']),
    ('MAX_RUNTIME', ['1 ms', 'forever'], ['0', '', 'x']),
    ('WORKER_IDLE_TIMEOUT', ['0', 'forever'], ['', '-1']),
    ('PROGRAM', ['y', 'y "a b"'], ['', '"']),
])
def test_options_of_a_stage_have_their_ranges(option, fine, wrong):
    for value in fine:
        parse('[stage-a]', '%s = %s' % (option, value), '' if option == 'PROGRAM' else 'PROGRAM = x')
    for value in wrong:
        [line] = get_errors('[stage-a]', '%s = %s' % (option, value), '' if option == 'PROGRAM' else 'PROGRAM = x')
        assert line.startswith("%s: [stage-a] %s = '%s' is wrong: it must be " % (FILE, option, value))


# -- text --------------------------------------------------------------------------------------------------------------

def test_option_names_may_have_any_case():
    assert parse('[stage-a]', 'program = x', 'Queue_Limit = 2').stages['a'].queue_limit == 2


def test_values_are_literal():
    config = parse('[pepsi]', "DATABASE = host=h password='50%;#=$x %(y)s'", '[stage-a]', 'PROGRAM = a%s ${b} %(c)s')
    assert config.database == "host=h password='50%;#=$x %(y)s'"
    assert config.stages['a'].program == ('a%s', '${b}', '%(c)s')


def test_comments_are_lines_that_begin_so():
    config = parse('# PARALLELISM = 7', '; [x]', '[stage-a]', '# QUEUE_LIMIT = 9', 'PROGRAM = x # y ; z')
    assert config.stages['a'].program == ('x', '#', 'y', ';', 'z')
    assert config.stages['a'].queue_limit == 4


def test_a_byte_order_mark_and_dos_lines_are_accepted():
    assert list(m.parse_config('\ufeff[stage-a]\r\nPROGRAM = x\r\n', FILE).stages) == ['a']


@pytest.mark.parametrize('name', ['a', 'A', 'two words', 'a.b/c', 'gr\xf6\xdfe', 'stage-a', 'a=b', '50%'])
def test_a_stage_may_have_any_printable_name(name):
    assert list(parse('[stage-%s]' % name, 'PROGRAM = x').stages) == [name]


@pytest.mark.parametrize('name', ['', ' ', 'id', 'a\x01b', 'a\x1b[0m'])
def test_a_stage_may_not_be_called_id_nor_be_unprintable(name):
    assert len(get_errors('[stage-%s]' % name, 'PROGRAM = x')) == 1


# -- warnings ----------------------------------------------------------------------------------------------------------

def test_an_unknown_option_is_a_warning_that_names_the_nearest():
    config = parse(STAGE, 'PARALELISM = 2', 'COLOUR = red')
    assert [w.split(': ', 1)[1] for w in config.warnings] == [
        '[stage-a] unknown option PARALELISM, the nearest known one is PARALLELISM',
        '[stage-a] unknown option COLOUR']
    assert config.stages['a'].parallelism == 4


@pytest.mark.parametrize('section, nearest', [
    ('pepsi-dispach', 'pepsi-dispatch'), ('Pepsi', 'pepsi'), ('pepsidispatch', 'pepsi-dispatch'),
    ('stage_a', 'stage-a')])
def test_an_unknown_section_is_a_warning_that_names_the_nearest(section, nearest):
    [warning] = parse(STAGE, '[%s]' % section, 'X = 1').warnings
    assert '[%s]' % section in warning and nearest in warning


def test_the_sections_of_the_neighbours_are_none_of_our_business():
    neighbours = '[pepsi-httpd]', 'PORT = 80', '[pepsi-ingress]', 'X = 1', '[pepsi-queue]', '[pepsi-http]'
    assert parse(STAGE, *neighbours).warnings == ()
    assert len(parse(STAGE, '[postgres]', 'PORT = 80').warnings) == 1


def test_a_configuration_without_stages_is_a_warning():
    assert len(parse('[pepsi]').warnings) == 1


# -- errors ------------------------------------------------------------------------------------------------------------

def test_all_errors_are_told_at_once_each_with_file_section_option_and_value():
    errors = get_errors('[pepsi-dispatch]', 'MAX_RUNTIME = soon', '[stage-a]', 'PROGRAM = x', 'QUEUE_LIMIT = 0',
                        '[stage-b]')
    assert len(errors) == 3
    assert errors[0].startswith("%s: [pepsi-dispatch] MAX_RUNTIME = 'soon' is wrong: it must be a time like " % FILE)
    assert errors[1] == "%s: [stage-a] QUEUE_LIMIT = '0' is wrong: it must be a whole number from 1 to 1000" % FILE
    assert errors[2].startswith('%s: [stage-b] PROGRAM is missing' % FILE)


@pytest.mark.parametrize('lines, shown', [
    (['[stage-a]', 'PROGRAM = x', '[stage-a]'], ['line 3', '[stage-a]']),
    (['[stage-a]', 'PROGRAM = x', 'program = y'], ['line 3', '[stage-a]', 'PROGRAM']),
    (['PROGRAM = x'], ['line 1']),
    (['[stage-a]', 'PROGRAM = x', 'QUEUE_LIMIT'], ['line 3']),
    (['[stage-a]', 'PROGRAM = x', '[stage-b'], ['line 3']),
    (['[DEFAULT]', 'PROGRAM = x'], ['[DEFAULT]']),
])
def test_what_is_malformed_or_there_twice_is_an_error_with_its_line(lines, shown):
    [error] = get_errors(*lines)
    assert all(text in error for text in shown)


def test_an_option_of_the_default_section_reaches_no_stage():
    assert get_errors('[DEFAULT]', 'QUEUE_LIMIT = 2', '[stage-a]', 'PROGRAM = x')


def test_a_bad_database_is_an_error_that_does_not_show_it():
    for value in ('postgresql://u:hunter2@[::1/d', 'password=hunter2 nonsense', "password='hunter2"):
        [error] = get_errors('[pepsi]', 'DATABASE = ' + value, STAGE)
        assert '[pepsi] DATABASE' in error and 'hunter2' not in error


@pytest.mark.parametrize('value', [
    '', 'postgresql:///d', 'postgres://u:p%40ss@[::1]:5433/d?sslmode=disable', 'host=/tmp port=5 dbname=d'])
def test_a_database_is_a_uri_a_keyword_string_or_nothing(value):
    assert parse('[pepsi]', 'DATABASE = ' + value, STAGE).database == value


def test_outside_text_in_an_error_is_escaped_and_bounded():
    [error] = get_errors(STAGE, 'PARALLELISM = \x1b[31m' + 'x' * 5000)
    assert '\\x1b[31mxxx' in error and len(error) < 1000


# -- files -------------------------------------------------------------------------------------------------------------

def write(path, text=STAGE):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_the_file_is_that_of_the_option_else_of_the_environment_else_the_default(tmp_path, monkeypatch):
    one, two, three = (write(tmp_path / name, '[stage-%s]\nPROGRAM = x' % name) for name in ('one', 'two', 'three'))
    monkeypatch.setattr(m, 'CONFIG_DEFAULT', three)
    monkeypatch.delenv('PEPSI_CONFIG', raising=False)
    assert list(m.load_config(None).stages) == ['three']
    monkeypatch.setenv('PEPSI_CONFIG', two)
    assert list(m.load_config(None).stages) == ['two']
    assert list(m.load_config(one).stages) == ['one']
    monkeypatch.setenv('PEPSI_CONFIG', '')
    assert list(m.load_config(None).stages) == ['three']


@pytest.mark.parametrize('make, shown', [
    (lambda p: str(p / 'missing'), 'No such file'), (lambda p: str(p), 'Is a directory'),
    (lambda p: write(p / 'latin1', b'[stage-a]\nPROGRAM = \xe4'), 'UTF-8')])
def test_a_file_that_cannot_be_read_is_an_error_of_one_line(tmp_path, make, shown):
    path = make(tmp_path)
    with pytest.raises(m.Failure) as e:
        m.load_config(path)
    [line] = e.value.lines
    assert e.value.code == 78 and path in line and shown in line
