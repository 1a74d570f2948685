"""How a command-line program starts and ends: flags, the config file, one-line errors, exit codes."""

import io
import logging as std_logging
import os
import re
import sys

from absl import app, flags, logging
from ml_collections import ConfigDict, config_dict, config_flags

from cubit_jax.runtime.devices import has_tpu, quiet_libtpu
from cubit_jax.runtime.errors import UserError, missing_device


def run(main, required=()):
    """Runs `main()` as a program: flags are parsed, a UserError becomes one line on stderr and exit code 1.

    Args:
      main: function of no arguments; its return value, if any, is the exit code.
      required: names of flags that must be given.
    """

    def parse(argv):
        try:
            return _parse(argv, required)
        except (KeyError, AttributeError) as error:
            fail(_unknown_field(error))
        except (flags.Error, UserError, ValueError, TypeError, OSError) as error:
            fail(error)

    def guarded(_):
        try:
            sys.exit(main())
        except (UserError, NotImplementedError) as error:  # the latter: what an implementation named cannot do, and why
            fail(error)
        except (RuntimeError, AssertionError) as error:  # JAX's own: importing JAX here would make --help wait for it
            if message := missing_device(error):
                fail(message)
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            fail(
                f"out of memory ({str(error).splitlines()[0]}): lower seq_len or batch_size, raise "
                "accumulation_steps, or use more devices; cubit_jax.plan says what fits on TPUs and GPUs"
            )
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            sys.exit(130)

    if not has_tpu():
        quiet_libtpu()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # text and paths may have characters that the encoding has not
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_is_for_the_user)
    logging.get_absl_handler().setFormatter(std_logging.Formatter("%(message)s"))
    app.run(guarded, flags_parser=parse)


def define_config():
    """Defines --config, a config file whose fields are flags of their own (`--config.optimizer.learning_rate=1e-3`)."""
    holder = config_flags.DEFINE_config_file(
        "config",
        None,
        "Config file and size, as configs/cubit.py:tiny; sizes are tiny, 125m, 350m and 1p3b, of configs/cem.py also "
        "86m and 162m, with variants as configs/cem.py:162m,mlp=gated,steps=2. Every "
        "field in configs/base.py is a flag too: --config.num_steps=1000 --config.optimizer.learning_rate=1e-3 "
        '--config.model.mixers=\'("cubit","attention")\'. They must stand after --config.',
    )
    flags.FLAGS["config"].parser = _AnyOption(flags.FLAGS["config"].parser)
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS["config"])  # --help shows the program's own flags
    return holder


def given_options() -> set[str]:
    """The names of the options of layers that flags set: `X` for --config.model.options.X=VALUE."""
    prefix = "model.options."
    return {name.removeprefix(prefix) for name in overridden() if name.startswith(prefix)}


def overridden() -> set[str]:
    """The names of the config's fields that flags set, as optimizer.learning_rate; none without a command line."""
    if "config" not in flags.FLAGS or not flags.FLAGS.is_parsed():
        return set()
    return set(config_flags.get_override_values(flags.FLAGS["config"]))


def config_name() -> str:
    """The value of --config as it was given, as configs/cubit.py:tiny."""
    return config_flags.get_config_filename(flags.FLAGS["config"])


class _AnyOption(flags.ArgumentParser):
    """Takes flags for options that the config's file does not list: a layer's fields are known to the model alone."""

    def __init__(self, of_files: flags.ArgumentParser):
        self._of_files = of_files

    def flag_type(self) -> str:
        return self._of_files.flag_type()

    def parse(self, path: str) -> ConfigDict:
        config = self._of_files.parse(path)
        arguments = flags.FLAGS.read_flags_from_files(sys.argv, force_gnu=False)
        matches = (re.match(r"--?(?:no)?config\.model\.options\.(\w+)", argument) for argument in arguments)
        if names := [match[1] for match in matches if match]:
            options = config.model.options
            with options.unlocked():
                options.update({name: config_dict.placeholder(object) for name in names if name not in options})
        return config


def fail(error, at_once=False):
    """Prints the error as one line and ends the process with exit code 1; at_once without waiting for its threads."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    if at_once:
        sys.stdout.flush()
        os._exit(1)
    sys.exit(1)


def _parse(argv, required):
    if path := _config_path(argv):
        if not os.path.isfile(path):
            raise UserError(f"--config={path}: there is no such file; try configs/cubit.py:tiny")
        # A family's file imports configs/base.py, also when the program is started from another folder.
        sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(path))))
    try:
        rest = flags.FLAGS(argv, known_only=False)
    except SystemExit:  # --help was answered: absl ends with 1, which a script would take for a failure
        sys.exit(0)
    except flags.IllegalFlagValueError as error:
        if "Traceback" not in str(error):
            raise
        raise UserError(f"--config={path}: {str(error).strip().splitlines()[-1].partition(': ')[2]}") from None
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}: flags start with --; see --help")
    for name in required:
        if not (value := flags.FLAGS[name].value):
            raise UserError(f"--{name} is {'missing' if value is None else 'empty'}: give --{name}=...; see --help")
    if "workdir" in flags.FLAGS and flags.FLAGS.workdir:
        if "://" in flags.FLAGS.workdir:
            raise UserError(
                f"--workdir={flags.FLAGS.workdir}: expected a folder; mount the object store (gcsfuse for "
                "gs://) or a shared disk, and give the folder where it is mounted"
            )
        flags.FLAGS.workdir = os.path.expanduser(flags.FLAGS.workdir)
    return rest


def _config_path(argv):
    """The file that --config names, without the size; None where it is not given."""
    for argument, following in zip(argv[1:], [*argv[2:], ""]):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "config":
            return (value if equals else following).partition(":")[0]
    return None


def _unknown_field(error):
    """One line for a field that the config does not have: ml_collections puts the nearest name into its message."""
    near = re.search(r'mean "(.*)" instead of "(.*)"', str(error))
    if near:
        return f"the config has no field {near[2]!r}: did you mean {near[1]!r}?"
    name = re.findall(r"\w+", str(error))[-1]
    return f"the config has no field {name!r}: configs/base.py lists them all"


def _is_for_the_user(record):
    """Orbax, grain and TFDS log each internal step, and with tracebacks failures that reach us as exceptions anyway."""
    if re.search(r"[/\\](orbax|grain|tensorflow_datasets)[/\\]", record.pathname):
        return False
    return record.levelname != "INFO" or not re.search(r"[/\\]jax[/\\]", record.pathname)
