"""What the command-line programs share: one-line errors, flag parsing and a progress display."""

import sys

from absl import app, flags, logging


class UserError(Exception):
    """A mistake of the user's. The message is one line that names the value, what was expected and what to do."""


def run(main, required=()):
    """Runs `main()` as a program: flags are parsed, a UserError becomes one line on stderr and exit code 1.

    Args:
      main: function of no arguments; its return value, if any, is the exit code.
      required: names of flags that must be given.
    """
    def parse(argv):
        try:
            rest = flags.FLAGS(argv, known_only=False)
            if len(rest) > 1:
                raise UserError(f"unexpected argument {rest[1]!r}: flags start with --; see --help")
            for name in required:
                if flags.FLAGS[name].value is None:
                    raise UserError(f"--{name} is missing: give --{name}=...; see --help")
            return rest
        except (flags.Error, UserError, AttributeError, KeyError, ValueError, TypeError, OSError) as error:
            fail(error)

    def guarded(_):
        try:
            sys.exit(main())
        except UserError as error:
            fail(error)

    logging.set_verbosity(logging.INFO)
    app.run(guarded, flags_parser=parse)


def fail(error):
    """Prints the error as one line and ends the process with exit code 1."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    sys.exit(1)
