"""
From arguments to an exit status: every error that is somebody's is one clear line.
"""

from envoy_tokenpools.cli import commands
from envoy_tokenpools.cli.parser import build_parser
from envoy_tokenpools.cli.process import EXIT_FAILED, EXIT_INTERRUPTED, complain
from envoy_tokenpools.errors import ConfigError, TokenpoolsError
from envoy_tokenpools.logs import configure_logs

_SHOWS = (commands.demo, commands.experiment, commands.simulate)
"""Commands whose output is what they show, not what happens."""


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv` (the process's arguments if None); returns the exit status."""
    arguments = build_parser().parse_args(argv)
    quiet = "warning" if arguments.run in _SHOWS else "info"
    configure_logs(arguments.log_level or quiet)
    try:
        status: int = arguments.run(arguments)
    except ConfigError as error:
        complain(f"{len(error.faults)} fault(s) in the configuration:\n{error}")
        return EXIT_FAILED
    except (TokenpoolsError, OSError) as error:
        complain(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status
