"""Command-line parser that loads only the chosen command, with helpful errors."""

import argparse
import difflib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

USER_ERROR = 2
"""Exit code of user errors."""


BOOLEANS = ("true", "false", "on", "off", "yes", "no")
"""Words that look like a value after a switch."""


class Help(str):
    """Long help of an option; `brief` is the short form for --help, empty to hide it."""

    brief: str

    def __new__(cls, whole: str, brief: str) -> Self:
        """Store the short form with the text."""
        text = super().__new__(cls, whole)
        text.brief = brief
        return text


class HelpAll(argparse.Action):
    """Prints the help with every option, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Show all options."""
        assert isinstance(parser, Parser)
        print(parser.format_all(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors and without abbreviated options.

    Each command has one, so common options may precede or follow the command. `fill` adds a command's own
    options once it is chosen, so that only their imports are loaded. `instead` gives advice for words that
    are no commands. `written` in the result maps settings to the options as typed.
    """

    def __init__(
        self,
        *,
        fill: "Callable[[Parser], None] | None" = None,
        instead: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self._fill, self._instead = fill, instead
        self._words: Sequence[str] = ()
        self.text_option: str | None = None
        """Option whose text may also follow MODEL without the option."""
        help_text = "log what the engine chooses and does"
        # No default: that of a command would override an option before it.
        self.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help=help_text)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Add the command's own options, then parse; unknown options and words are errors here."""
        fill, self._fill = self._fill, None
        if fill:
            fill(self)
            if any(isinstance(action.help, Help) for action in self._actions):
                help_text = "show every option"
                self.add_argument(
                    "--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help=help_text
                )
        words = self._words = sys.argv[1:] if args is None else list(args)
        # Checked before argparse reports missing arguments, which a typo may have caused.
        seen: dict[str, str] = {}
        for option in self._own_options(words):
            if option not in self._option_string_actions:
                visible = [
                    name
                    for name, action in self._option_string_actions.items()
                    if action.help != argparse.SUPPRESS
                ]
                self.error(f"{option} is not an option of {self.prog}{near(option, visible)}")
            self._refuse_twice(option, seen)
        parsed, unknown = super().parse_known_args(words, namespace)
        unknown = self._further_values(words, unknown, parsed)
        unknown = self._further_text(words, unknown, parsed)
        if unknown:
            self._refuse(unknown[0], words)
        actions = [(self._option_string_actions[option], option) for option in self._own_options(words)]
        written = {name: option for action, option in actions for name in _sets(action)}
        parsed.written = {**getattr(parsed, "written", {}), **written}
        return parsed, unknown

    def _further_values(
        self, words: Sequence[str], unknown: Sequence[str], namespace: argparse.Namespace
    ) -> list[str]:
        """Append extra words to the preceding list option, as in `serve MODEL --stop a b`.

        Return the other words. nargs="+" would also consume a MODEL after the list.
        """
        remaining, counts = [*unknown], Counter[str]()
        for i, option in enumerate(words):
            action = self._option_string_actions.get(option.partition("=")[0])
            if not isinstance(action, argparse._AppendAction):
                continue
            counts[action.dest] += 1
            for word in itertools.takewhile(lambda text: not text.startswith("-"), words[i + 2 :]):
                if "=" not in option and [word] == remaining[:1]:
                    value = self._get_value(action, remaining.pop(0))
                    getattr(namespace, action.dest).insert(counts[action.dest], value)
                    counts[action.dest] += 1
        return remaining

    def _further_text(
        self, words: Sequence[str], unknown: list[str], namespace: argparse.Namespace
    ) -> list[str]:
        """Set the text option to a word after MODEL; return the remaining words.

        A positional argument would not work: argparse does not accept one after a later option.
        """
        if self.text_option is None or not unknown or _is_option(unknown[0]):
            return unknown
        if unknown[0].lower() in BOOLEANS and self._switch_before(unknown[0], words):
            return unknown  # meant as the switch's value
        action = self._option_string_actions[self.text_option]
        if getattr(namespace, action.dest) is not None:
            return unknown
        setattr(namespace, action.dest, unknown[0])
        return unknown[1:]

    def _get_option_tuples(self, option_string: str) -> list[tuple[argparse.Action, str, str | None]]:
        """Split `-n16` and `-vv`, but neither shorten `-ngl` to `-ng`, nor split `-mg` into `-m` and g."""
        is_word = option_string[2:3].isalpha()
        matches = super()._get_option_tuples(option_string)
        return [entry for entry in matches if len(entry[1]) == 2 and (entry[0].nargs == 0 or not is_word)]

    def _refuse(self, word: str, words: Sequence[str]) -> NoReturn:
        """Report an extra word; one after a switch was meant as its value."""
        if switch := self._switch_before(word, words):
            self.error(_needless(switch.option_strings, repr(word)))
        if self.text_option is None or _is_option(word):
            self.error(f"{self.prog} does not take {word!r}")
        text = self._option_string_actions[self.text_option]
        options = [
            option for option in self._own_options(words) if self._option_string_actions[option] is text
        ]
        if options:
            self.error(
                f"{options[0]} and {word!r} both give the {text.dest}; give it once, in quotes if it has "
                "several words"
            )
        self.error(f"{self.prog} does not take {word!r}; quote an argument with spaces")

    def _switch_before(self, word: str, words: Sequence[str]) -> argparse.Action | None:
        previous = words[words.index(word) - 1] if word in words[1:] else ""
        return self._option_string_actions.get(previous) if previous.startswith("--") else None

    def _refuse_twice(self, option: str, seen: dict[str, str]) -> None:
        """Report a setting given by two different options."""
        action = self._option_string_actions[option]
        for setting in _sets(action):
            first = seen.setdefault(setting, option)
            if self._option_string_actions[first] is not action:
                self.error(f"{first} and {option} both set {setting}; give one of them")

    def _own_options(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the options before a command; as in argparse, a word with a blank is a value."""
        chosen = [action.choices or () for action in self._actions if action.nargs == argparse.PARSER]
        ends = {"--", *itertools.chain.from_iterable(chosen)}
        for word in itertools.takewhile(lambda word: word not in ends, words):
            if word in self._option_string_actions or (word.startswith("--") and " " not in word):
                yield word.partition("=")[0]

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Raise if output cannot be written, which argparse ignores."""
        if file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def format_help(self) -> str:
        """Format the short help; options with an empty short form are hidden."""
        full = {action: action.help for action in self._actions if isinstance(action.help, Help)}
        if not full:
            return self.format_all()
        positionals = [action for action in self._actions if not action.option_strings]
        names = [f"{action.metavar}{' …' if action.nargs == '*' else ''}" for action in positionals]
        text = ["[TEXT]"] if self.text_option else []
        self.usage = " ".join(["%(prog)s [options]", *names, *text])
        for action, help_text in full.items():
            action.help = help_text.brief or argparse.SUPPRESS
        try:
            return self.format_all()
        finally:
            self.usage = None
            for action, help_text in full.items():
                action.help = help_text

    def format_all(self) -> str:
        """Format the long help with every option."""
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with the message, a suggestion if there is one, and a pointer to --help."""
        if match := re.search(r"^argument (.*): invalid choice: '(.*)' \(choose from (.*)\)$", message):
            message = self._unknown_word(match[1], match[2], re.findall(r"[\w.-]+", match[3]))
        if match := re.search(r"^argument (.*): ignored explicit argument (.*)$", message):
            message = _needless(match[1].split("/"), match[2])
        if match := re.search(r"^argument (.*): expected (?:one|at least one) argument$", message):
            message = self._missing(match[1].split("/"))
        message = message.removeprefix("argument ")
        more = " See" if message.endswith("?") else "; see"
        self.exit(USER_ERROR, f"specdec: {message}{more} {self.prog} --help\n")

    def _missing(self, names: Sequence[str]) -> str:
        """Describe a missing value; a word that begins with - counts as an option."""
        option = next((name for name in names if name in self._words), names[-1])
        action = self._option_string_actions.get(option)
        value = (action and action.metavar) or "VALUE"
        return f"{option} needs a value: {option} {value}, or {option}={value} where it begins with -"

    def _unknown_word(self, name: str, word: str, choices: Sequence[str]) -> str:
        """Describe an unknown word with the alternatives."""
        if name.startswith("-"):
            return f"{name} cannot be {word!r}; give {', '.join(choices[:-1])} or {choices[-1]}"
        if word in self._instead:
            return f"{word} is not a command of {self.prog}: {self._instead[word]}"
        return f"{word} is not a command of {self.prog}" + (
            near(word, choices) or f"; known are {', '.join(choices)}"
        )


def _sets(action: argparse.Action) -> Sequence[str]:
    """Return the settings an option sets; another engine's option may set several."""
    sets: Sequence[str] = getattr(action, "sets", (action.dest,))
    return sets


def _is_option(word: str) -> bool:
    """Return whether argparse treats a word as an option."""
    return word.startswith("-") and word != "-" and " " not in word


def _needless(switch: Sequence[str], value: str) -> str:
    ways = " or ".join(switch)
    return f"{ways} takes no value such as {value}; write {ways}, or leave it out"


def as_written(message: str, written: Mapping[str, str]) -> str:
    """Replace setting names in an error by the options as typed.

    "or None" is dropped: None means an omitted option, which is no value to give.
    """

    def option(match: re.Match[str]) -> str:
        return written.get(match[1], match[0])

    return re.sub(r"(?:\b[A-Z]\w*\.|^)(\w+)\b", option, message).replace(", or None", "")


def as_typed(message: str) -> str:
    """Replace advice such as draft='auto' in an error by options: --draft auto.

    A URL's query, as in ?bootstrap=PORT, is left alone.
    """

    def option(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')} {match[2] or match[3]}"

    return re.sub(r"(?<![?&])\b([a-z_]+)=(?:'([^']*)'|([A-Z]+\b))", option, message)


def near(word: str, candidates: Iterable[str]) -> str:
    """Return a suggestion of similar names, or ""."""
    names = {name.lstrip("-"): name for name in candidates}  # dashes would make any two options similar
    close = [names[key] for key in difflib.get_close_matches(word.replace("_", "-").lstrip("-"), names, n=2)]
    return f"; did you mean {' or '.join(close)}?" if close else ""
