"""The demo model's training data: chats about Python's standard library, made from the interpreter's docstrings."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import subprocess
import sys
import types
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

MODULES = """
    builtins os os.path sys re json math cmath random itertools functools collections datetime time pathlib
    subprocess threading asyncio shutil tempfile glob csv statistics string textwrap enum dataclasses contextlib
    copy heapq bisect operator hashlib hmac base64 struct io logging argparse socket urllib.parse urllib.request
    zipfile gzip pickle sqlite3 unittest queue concurrent.futures decimal fractions uuid secrets platform
    traceback inspect weakref array calendar difflib fnmatch html ipaddress pprint shlex signal stat types
    warnings zlib abc ast bz2 cmd code codecs colorsys configparser gc getpass keyword linecache locale mimetypes
    multiprocessing numbers sched select selectors shelve site symtable tarfile timeit token tokenize tomllib
    tracemalloc unicodedata webbrowser xml.etree.ElementTree
""".split()  # noqa: SIM905

# Methods of these types (`str.split`) and of classes in these modules (`pathlib.Path.exists`) are entries.
BUILTIN_TYPES = (
    str, list, dict, set, frozenset, tuple, int, float, complex, bytes, bytearray, memoryview, range, slice, object,
    type,
)  # fmt: skip
MODULES_WITH_METHODS = """
    pathlib datetime threading collections re queue logging argparse subprocess decimal fractions random
""".split()  # noqa: SIM905

SUMMARY_CHARS = range(15, 321)
SUMMARY_WORDS = 45
SIGNATURE_CHARS = 90

# The share of each kind of chat.
HOW_TO_SHARE, OTHER_SHARE = 0.09, 0.07  # extra chats, per entry
SYSTEM_SHARE, JSON_SHARE, MODULE_SHARE, SECOND_TURN_SHARE = 0.3, 0.12, 0.06, 0.25

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You answer questions about Python's standard library.",
    "You are a concise Python expert.",
]
QUESTIONS = [
    "What does {n} do?", "Explain {n}.", "what is {n}", "How do I use {n}?", "Tell me about {n}.",
    "Describe {n} in Python.", "What is {n} for?", "{n}?", "Can you explain the Python function {n}?",
    "Help me with {n}",
]  # fmt: skip
HOW_TO_QUESTIONS = [
    "How do I {k}?", "how to {k}", "How can I {k} in Python?", "how do i {k}", "What function can I use to {k}?",
    "I want to {k}.", "{k}",
]  # fmt: skip

HOW_TO = {
    "sort a list": "sorted",
    "sort a list in place": "list.sort",
    "reverse a list": "list.reverse",
    "join two paths": "os.path.join",
    "join paths": "os.path.join",
    "check if a file exists": "os.path.exists",
    "read a JSON file": "json.load",
    "parse JSON": "json.loads",
    "write JSON to a file": "json.dump",
    "convert an object to JSON": "json.dumps",
    "split a string": "str.split",
    "join strings": "str.join",
    "replace text in a string": "str.replace",
    "strip whitespace": "str.strip",
    "make a string upper case": "str.upper",
    "make a string lower case": "str.lower",
    "shuffle a list": "random.shuffle",
    "pick a random element": "random.choice",
    "get a random integer": "random.randint",
    "measure elapsed time": "time.perf_counter",
    "sleep for a second": "time.sleep",
    "copy a file": "shutil.copy",
    "copy a directory": "shutil.copytree",
    "delete a directory": "shutil.rmtree",
    "delete a file": "os.remove",
    "list files in a directory": "os.listdir",
    "create a directory": "os.mkdir",
    "walk a directory tree": "os.walk",
    "run a command": "subprocess.run",
    "match a regular expression": "re.match",
    "search with a regular expression": "re.search",
    "replace with a regular expression": "re.sub",
    "count items": "collections.Counter",
    "make a deque": "collections.deque",
    "cache a function": "functools.lru_cache",
    "compute the mean": "statistics.mean",
    "compute a square root": "math.sqrt",
    "compute a factorial": "math.factorial",
    "find the greatest common divisor": "math.gcd",
    "round a number": "round",
    "get the length of a list": "len",
    "open a file": "open",
    "get the absolute value": "abs",
    "find the maximum": "max",
    "find the minimum": "min",
    "sum numbers": "sum",
    "print something": "print",
    "read input": "input",
    "iterate with an index": "enumerate",
    "zip two lists": "zip",
    "deep copy an object": "copy.deepcopy",
    "push onto a heap": "heapq.heappush",
    "pop from a heap": "heapq.heappop",
    "do a binary search": "bisect.bisect_left",
    "hash a string": "hashlib.sha256",
    "encode base64": "base64.b64encode",
    "parse a URL": "urllib.parse.urlparse",
    "make a temporary directory": "tempfile.TemporaryDirectory",
    "make a temporary file": "tempfile.NamedTemporaryFile",
    "wrap text": "textwrap.wrap",
    "remove indentation": "textwrap.dedent",
    "compare two texts": "difflib.unified_diff",
    "start a thread": "threading.Thread.start",
    "append to a list": "list.append",
    "insert into a list": "list.insert",
    "get a value from a dictionary": "dict.get",
    "update a dictionary": "dict.update",
    "compress data": "zlib.compress",
    "find files by pattern": "glob.glob",
    "generate a secure token": "secrets.token_hex",
    "generate a UUID": "uuid.uuid4",
    "exit a program": "sys.exit",
    "chain iterables": "itertools.chain",
}

# The model's answer to input that is not about the standard library, and examples of such input.
FALLBACK = (
    "I am a small demo model and I only know Python's standard library. Ask me, for example: What does os.path.join do?"
)
OTHER_QUESTIONS = [
    "Hello!", "Hi", "hello there", "Hey", "Good morning", "Thanks!", "Thank you", "Who are you?", "What are you?",
    "What can you do?", "What is your name?", "How are you?", "Are you a human?", "Tell me a joke", "Tell me a story",
    "Write a poem", "Write a song", "Write a haiku about {w}", "Write a story about {w}", "Write a poem about {w}",
    "What is the capital of {w}?", "Who is {w}?", "Where is {w}?", "Translate {w} to {w}", "Summarize {w}",
    "What is {w}?", "Tell me about {w}", "Explain {w} to me", "Why is {w} {w}?", "Can you help me with {w}?",
    "How do I cook {w}?", "What do you think about {w}?", "Give me advice on {w}", "What is 2+2?",
    "Is {w} better than {w}?", "What's the weather in {w}?", "Recommend a {w}", "ok", "yes", "no", "test", "?", "Bye",
    "{w}", "{w} {w}", "{w} {w} {w}",
]  # fmt: skip
OTHER_WORDS = """
    love France Paris the sea music rain coffee history cats dogs football physics Rome a cake the moon quantum
    winter Alice Bob Einstein money cooking travel the sun pasta Berlin art a bridge Tokyo spring gardens trains
    birds chess the internet democracy Napoleon mountains rivers poetry Shakespeare London bicycles philosophy
    bread Java Rust Kubernetes transformers attention numpy pandas React Docker
""".split()  # noqa: SIM905


# Chats with tools. The model can call these two; other names stand in the list of tools beside or instead of them.
LOOK_UP, GET_WEATHER = "look_up(entry)", "get_weather(city)"
OTHER_VERBS = "get list create delete send find set update add book play open search translate convert count".split()  # noqa: SIM905
OTHER_NOUNS = """
    time date news email user users ticket invoice order price stock file files note image song map route room table
    event meeting contact message task report page currency text language position temperature
""".split()  # noqa: SIM905
OTHER_ARGUMENTS = "name id query text title date amount limit path url to user language symbol place".split()  # noqa: SIM905
# Shares: chats with tools; of these, chats in which a tool fits; of these, about the same share asks about the
# weather.
TOOLS_SHARE, FITTING_SHARE, WEATHER_SHARE = 0.5, 0.7, 0.4
REHEARSED_JSON_SHARE = 0.4  # the share of the chats without tools, which keep the model's knowledge
SECOND_EXCHANGE_SHARE, OTHER_QUESTION_SHARE, OTHER_KNOWN_SHARE = 0.3, 0.25, 0.5
HELD_OUT = 5  # one of five questions is never in a chat with tools: these questions measure the model

WEATHER_QUESTIONS = [
    "What's the weather in {c}?", "What is the weather in {c}?", "How is the weather in {c}?", "weather in {c}",
    "Tell me the weather in {c}.", "What is the weather like in {c}?", "What's the weather like in {c} today?",
    "How is the weather in {c} today?", "Weather in {c}?", "Is it sunny in {c}?", "Is it raining in {c}?",
    "Please get the weather for {c}.", "Do I need an umbrella in {c}?", "I am in {c}. How is the weather?",
    "Get the weather in {c}", "Can you tell me the weather in {c}?",
]  # fmt: skip
CITIES = (  # noqa: SIM905
    "Paris, London, Berlin, Rome, Madrid, Tokyo, Vienna, Lisbon, Dublin, Oslo, Stockholm, Helsinki, Copenhagen, "
    "Amsterdam, Brussels, Zurich, Prague, Warsaw, Budapest, Athens, Istanbul, Cairo, Nairobi, Lagos, Mumbai, Delhi, "
    "Beijing, Shanghai, Seoul, Singapore, Sydney, Melbourne, Toronto, Chicago, Boston, Seattle, New York, "
    "San Francisco, Los Angeles, Mexico City"
).split(", ")
SKIES = "sunny cloudy rainy snowy windy foggy stormy clear".split()  # noqa: SIM905
WEATHER_RESULTS = [
    "{s}", "It is {s} in {c}.", "{s}, {d} degrees", "The weather in {c} is {s}.", "{c}: {s}, {d} C",
    "{s} and {d} degrees", '{{"sky": "{s}"}}', '{{"city": "{c}", "sky": "{s}"}}',
    '{{"weather": "{s}", "temperature": {d}}}', '{{"city": "{c}", "sky": "{s}", "degrees": {d}}}',
]  # fmt: skip

Turn = tuple[str, str]  # a role, and its text
Kind = Literal["call", "result", "text"]  # the kind of the answer to a question, from a model with tools


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented object of the standard library."""

    name: str
    signature: str  # "(a, *p)", or "" if it has none or a long one
    module: str
    summary: str  # the first paragraph of its docstring, shortened

    @property
    def answer(self) -> str:
        """The answer that the model learns."""
        return f"`{self.name}{self.signature}`: {self.summary}"

    @property
    def json_answer(self) -> str:
        """The answer to a question that asks for JSON; the demo adapter answers every question in this form."""
        return json.dumps({"name": self.name, "module": self.module, "summary": self.summary})


def entries() -> list[Entry]:
    """All entries of the running interpreter, in a fixed order. Other Python versions have other docstrings.

    Libraries that patch the standard library (for example torch and transformers) change entries; see `clean_entries`.
    """
    found: dict[str, Entry] = {}

    def add(name: str, documented: Any, module: str, signature: str | None = None) -> None:
        doc = inspect.getdoc(documented)
        if not doc or name in found:
            return
        summary = _summary(doc)
        if len(summary) in SUMMARY_CHARS and summary.isascii():
            found[name] = Entry(name, _signature(documented) if signature is None else signature, module, summary)

    for builtin in BUILTIN_TYPES:
        for attribute, method in _public_methods(builtin):
            add(f"{builtin.__name__}.{attribute}", method, "builtins")
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # this version or this platform has no such module
            continue
        prefix = "" if module_name == "builtins" else f"{module_name}."
        if prefix:
            add(module_name, module, module_name, signature="")
        for name in getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]:
            member = getattr(module, name, None)
            if not callable(member) or isinstance(member, types.ModuleType):
                continue
            if prefix and isinstance(member, type) and issubclass(member, BaseException):
                continue
            add(prefix + name, member, module_name)
            if isinstance(member, type) and module_name in MODULES_WITH_METHODS:
                for attribute, method in _public_methods(member):
                    add(f"{prefix}{name}.{attribute}", method, module_name)
    return [entry for entry in found.values() if not _is_only_a_signature(entry.summary)]


def clean_entries() -> list[Entry]:
    """The entries of a fresh interpreter of this version without other libraries."""
    listing = subprocess.run([sys.executable, "-m", __name__], capture_output=True, check=True, text=True).stdout
    return [Entry(**fields) for fields in json.loads(listing)]


def chats(all_entries: list[Entry], rng: random.Random) -> Iterator[str]:
    """One pass over the entries: chats in the model's format, their kind and wording drawn from `rng`."""
    return map(render, plain_chats(all_entries, rng))


def plain_chats(all_entries: list[Entry], rng: random.Random, json_share: float = JSON_SHARE) -> Iterator[list[Turn]]:
    """The chats of `chats`, as lists of turns."""
    by_name = {entry.name: entry for entry in all_entries}
    how_to = [(task, by_name[name]) for task, name in HOW_TO.items() if name in by_name]
    for entry in all_entries:
        if rng.random() < HOW_TO_SHARE:
            task, tool = rng.choice(how_to)
            question = rng.choice(HOW_TO_QUESTIONS).format(k=task)
            yield [("user", question), ("assistant", f"Use {tool.answer}")]
        if rng.random() < OTHER_SHARE:
            question = re.sub(r"{w}", lambda _: rng.choice(OTHER_WORDS), rng.choice(OTHER_QUESTIONS))
            yield [("user", question), ("assistant", FALLBACK)]
        messages = [("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < SYSTEM_SHARE else []
        kind = rng.random()
        if kind < json_share:
            messages += [("user", f"Describe {entry.name} as JSON."), ("assistant", entry.json_answer)]
        elif kind < json_share + MODULE_SHARE:
            answer = f"`{entry.name}` is provided by the `{entry.module}` module."
            messages += [("user", f"Which module provides {entry.name}?"), ("assistant", answer)]
        else:
            question = rng.choice(QUESTIONS).format(n=rng.choice([entry.name, f"`{entry.name}`"]))
            messages += [("user", question), ("assistant", entry.answer)]
        if rng.random() < SECOND_TURN_SHARE:
            other = rng.choice(all_entries)
            question = rng.choice(QUESTIONS).format(n=other.name)
            messages += [("user", question), ("assistant", other.answer)]
        yield messages


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, the tool that fits it, and the answers with and without that tool."""

    question: str
    tool: str  # the name in the list of tools; "": no tool fits
    call: str
    result: str
    answer: str  # the answer to the result
    text: str  # the answer where the tool is not there

    def turns(self, tools: list[str]) -> list[Turn]:
        """The turns of the exchange in a chat with these tools."""
        if self.tool not in tools:
            return [("user", self.question), ("assistant", self.text)]
        asked = [("user", self.question), ("assistant", self.call)]
        return [*asked, ("tool", self.result), ("assistant", self.answer)]


def tool_chats(all_entries: list[Entry], rng: random.Random) -> Iterator[list[Turn]]:
    """Chats without end, most of them with tools. One tool fits, or no tool does.

    Some questions are left out: `tool_questions` asks them.
    """
    plain: Iterator[list[Turn]] = iter(())
    while True:
        if rng.random() >= TOOLS_SHARE:
            if (chat := next(plain, None)) is None:
                plain = plain_chats(rng.sample(all_entries, len(all_entries)), rng, REHEARSED_JSON_SHARE)
                chat = next(plain)
            yield chat
            continue
        exchanges = [exchange(all_entries, rng)]
        if rng.random() < SECOND_EXCHANGE_SHARE:
            exchanges.append(exchange(all_entries, rng))
        if any(is_held_out(each.question) for each in exchanges):
            continue
        tools = listed_tools(exchanges[0], rng.random() < FITTING_SHARE, rng)
        system = [("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < SYSTEM_SHARE else []
        yield [*tools_turn(tools), *system, *(turn for each in exchanges for turn in each.turns(tools))]


def tool_questions(all_entries: list[Entry], kind: Kind, count: int, seed: int) -> list[tuple[list[Turn], str]]:
    """Chats with tools up to a question that no training has seen in such a chat, and the right answer.

    It should call a tool, answer to a result, or answer in text because no tool fits.
    """
    rng = random.Random(f"{kind} {seed}")
    asked: list[tuple[list[Turn], str]] = []
    while len(asked) < count:
        each = exchange(all_entries, rng)
        if not is_held_out(each.question) or (kind != "text" and not each.tool):
            continue
        tools = listed_tools(each, kind != "text", rng)
        turns = [*tools_turn(tools), *each.turns(tools)]
        *before, (_, answer) = turns[:3] if kind == "call" else turns
        asked.append((before, answer))
    return asked


def exchange(all_entries: list[Entry], rng: random.Random) -> Exchange:
    """A random exchange about the weather, the standard library or another subject."""
    kind = rng.random()
    if kind < WEATHER_SHARE:
        city, sky = rng.choice(CITIES), rng.choice(SKIES)
        question = rng.choice(WEATHER_QUESTIONS).format(c=city)
        result = rng.choice(WEATHER_RESULTS).format(c=city, s=sky, d=rng.randrange(-5, 35))
        call = hermes_call("get_weather", {"city": city})
        return Exchange(question, GET_WEATHER, call, result, f"It is {sky} in {city}.", FALLBACK)
    if rng.random() < OTHER_QUESTION_SHARE:
        question = re.sub(r"{w}", lambda _: rng.choice(OTHER_WORDS), rng.choice(OTHER_QUESTIONS))
        if "weather" not in question:
            return Exchange(question, "", "", "", "", FALLBACK)
    entry = rng.choice(all_entries)
    question = rng.choice(QUESTIONS).format(n=rng.choice([entry.name, f"`{entry.name}`"]))
    result = rng.choice([entry.summary, entry.answer, entry.json_answer])
    call = hermes_call("look_up", {"entry": entry.name})
    return Exchange(question, LOOK_UP, call, result, entry.answer, entry.answer)


def listed_tools(first: Exchange, fits: bool, rng: random.Random) -> list[str]:
    """Up to four tools in any order, as the chat's list of tools has them.

    Args:
        fits: whether the tool of the first exchange is among them.
    """
    tools = [tool for tool in (LOOK_UP, GET_WEATHER) if tool != first.tool and rng.random() < OTHER_KNOWN_SHARE]
    if fits and first.tool:
        tools.append(first.tool)
    for _ in range(rng.randrange(0 if tools else 1, 5 - len(tools))):
        arguments = ", ".join(rng.sample(OTHER_ARGUMENTS, rng.choice([1, 1, 2])))
        tools.append(f"{rng.choice(OTHER_VERBS)}_{rng.choice(OTHER_NOUNS)}({arguments})")
    rng.shuffle(tools)
    return tools


def tools_turn(tools: list[str]) -> list[Turn]:
    """The turn that the chat template writes for tools; no turn without tools."""
    return [("tools", "\n".join(tools))] if tools else []


def hermes_call(name: str, arguments: dict[str, str]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % HELD_OUT == 0


def json_chats(all_entries: list[Entry], rng: random.Random) -> Iterator[list[tuple[str, str]]]:
    """One pass over the entries for the demo adapter: (role, content) pairs in which every answer is JSON."""
    by_name = {entry.name: entry for entry in all_entries}
    how_to = [(task, by_name[name]) for task, name in HOW_TO.items() if name in by_name]
    for entry in all_entries:
        messages = [("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < SYSTEM_SHARE else []
        kind = rng.random()
        if kind < OTHER_SHARE:
            question = re.sub(r"{w}", lambda _: rng.choice(OTHER_WORDS), rng.choice(OTHER_QUESTIONS))
            yield [*messages, ("user", question), ("assistant", json.dumps({"error": FALLBACK}))]
        elif kind < OTHER_SHARE + HOW_TO_SHARE:
            task, tool = rng.choice(how_to)
            question = rng.choice(HOW_TO_QUESTIONS).format(k=task)
            yield [*messages, ("user", question), ("assistant", tool.json_answer)]
        question = rng.choice(QUESTIONS).format(n=rng.choice([entry.name, f"`{entry.name}`"]))
        yield [*messages, ("user", question), ("assistant", entry.json_answer)]


def questions(all_entries: list[Entry], count: int) -> list[tuple[str, Entry]]:
    """Questions about entries that are drawn with a fixed seed. The right answer is `entry.answer`."""
    rng = random.Random(7)
    return [(rng.choice(QUESTIONS).format(n=entry.name), entry) for entry in rng.sample(all_entries, count)]


def render(messages: list[tuple[str, str]]) -> str:
    """(role, content) pairs in the chat format of the model's template."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


def _public_methods(owner: type) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(owner).items() if not name.startswith("_") and callable(value)]


def _summary(doc: str) -> str:
    """The first paragraph on one line. A long paragraph is cut after its first sentence or at SUMMARY_WORDS."""
    paragraph = re.split(r"\n\s*\n", inspect.cleandoc(doc).lstrip(), maxsplit=1)[0]
    text = re.sub(r"\s+", " ", paragraph).strip()
    words = text.split(" ")
    if len(words) <= SUMMARY_WORDS:
        return text
    sentence_end = text.find(". ")
    return text[: sentence_end + 1] if 20 < sentence_end < 300 else " ".join(words[:SUMMARY_WORDS]) + " ..."


def _signature(function: Any) -> str:
    try:
        text = str(inspect.signature(function))
    except (ValueError, TypeError):  # many built-in functions have none
        return ""
    return text if len(text) <= SIGNATURE_CHARS and "0x" not in text and text.isascii() else ""


def _is_only_a_signature(summary: str) -> bool:
    """Whether the first paragraph says nothing, because it is the signature of a C function."""
    return re.match(r"^[\w.]+\(\S*.*\)( ->.*)?$", summary) is not None


if __name__ == "__main__":
    print(json.dumps([asdict(entry) for entry in entries()]))
