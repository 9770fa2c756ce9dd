"""The command of each module here: prints what its function `rows` returns, a line of JSON for each row."""

import inspect
import json

from sorl_trl.command_line import Parser, mistakes, run_command


def print_rows(rows, description):
    """The parameters of `rows` are the command's arguments, with a default as options. Returns the exit code."""

    def main(words):
        parser = Parser(description=description)
        for each in inspect.signature(rows).parameters.values():
            required = each.default is each.empty
            options = {} if required else {"default": each.default}
            parser.add_argument(each.name if required else f"--{each.name}", type=each.annotation, **options)
        arguments = parser.parse_args(words)
        with mistakes():
            made = rows(**vars(arguments))
        print("\n".join(map(json.dumps, made)))

    return run_command(main)
