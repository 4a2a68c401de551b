"""Build and install pepsi-dispatch: two modules, one command, one manual page."""
import os
import re

from setuptools import setup

HERE = os.path.dirname(os.path.abspath(__file__))


def read(name):
    """Return the text of a file that lies beside this one."""
    with open(os.path.join(HERE, name), encoding='utf-8') as file:
        return file.read()


def find_version(source):
    """Return what source assigns to __version__.

    The module is read, not imported: what it imports is installed only after this ran.
    """
    found = re.search(r"^__version__ = '([^']+)'$", source, re.MULTILINE)
    if not found:
        raise SystemExit("pepsidispatch.py has no line of the form __version__ = '1.2.3'")
    return found.group(1)


setup(
    name='pepsi-dispatch',
    version=find_version(read('pepsidispatch.py')),
    description='The dispatcher of PEPSI: starts stage programs for the messages queued in PostgreSQL',
    long_description=read('README.md') if os.path.exists(os.path.join(HERE, 'README.md')) else '',
    long_description_content_type='text/markdown',
    author='the pepsi-dispatch authors',
    license='MIT',
    py_modules=['pepsidispatch', 'worker_stub'],
    data_files=[('share/man/man1', ['pepsi-dispatch.1'])],
    entry_points={'console_scripts': ['pepsi-dispatch = pepsidispatch:main']},
    python_requires='>=3.6',
    install_requires=['psycopg2-binary', 'docopt'],
    classifiers=[
        'Development Status :: 4 - Beta',
        'Environment :: No Input/Output (Daemon)',
        'Intended Audience :: System Administrators',
        'Operating System :: POSIX',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3 :: Only',
    ] + ['Programming Language :: Python :: 3.%d' % minor for minor in range(6, 16)] + [
        'Topic :: Database',
        'Topic :: System :: Distributed Computing',
    ],
)
