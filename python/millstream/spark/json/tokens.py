"""A pull parser for one JSON text that stops, fails and recovers where Spark's own parser does.

Where it sits: below `convert.py`, for the records that the fast path of `decoder.py` leaves. Spark reads JSON
with Jackson; which fields of a broken record survive depends on when Jackson notices the break. So
this parser has its habits: a name is read together with the first character of its value, a string is
checked when its text is asked for, and an error leaves the position behind the offending character.

Like Spark by default it allows 'single quotes' and NaN and Infinity without quotes, and ignores what follows the
first value.

Invariants:
- I-TOK-1  Every error is `Malformed`; no input makes it raise anything else.
- I-TOK-2  Nesting and the length of numbers are bounded as Jackson bounds them.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

DEPTH_MAX: Final = 1000
NUMBER_CHARACTERS_MAX: Final = 1000
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_PLAIN: Final = {
    '"': re.compile(r'[^"\\\x00-\x1f]*'),
    "'": re.compile(r"[^'\\\x00-\x1f]*"),
}
_WORDS: Final = re.compile(r"true|false|null|NaN|Infinity|-Infinity|-INF|\+Infinity|\+INF")
_HEX: Final = re.compile(r"[0-9a-fA-F]{0,4}")
_BASE64: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_PADDING: Final = -2
_ESCAPES: Final = {
    "b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "/": "/", "\\": "\\", "'": "'",
}  # fmt: skip


class Malformed(Exception):  # noqa: N818 - it reports what the record is
    """The text is not JSON from here on."""


class Token(Enum):
    START_OBJECT = "{"
    END_OBJECT = "}"
    START_ARRAY = "["
    END_ARRAY = "]"
    FIELD_NAME = "name"
    STRING = "string"
    INT = "int"
    FLOAT = "float"
    TRUE = "true"
    FALSE = "false"
    NULL = "null"


STARTS: Final = frozenset({Token.START_OBJECT, Token.START_ARRAY})
ENDS: Final = frozenset({Token.END_OBJECT, Token.END_ARRAY})
_WORD_TOKENS: Final = {"true": Token.TRUE, "false": Token.FALSE, "null": Token.NULL}


class _Scope:
    """One level of nesting."""

    __slots__ = ("count", "is_object", "name")

    def __init__(self, *, is_object: bool) -> None:
        self.is_object = is_object
        self.count = 0
        self.name: str | None = None


class Tokens:
    """The tokens of one text. `token` is the current one; `text()` its text."""

    __slots__ = ("_closed", "_next", "_pending", "_position", "_quote", "_scopes", "_text", "_value", "token")  # fmt: skip

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._scopes: list[_Scope] = []
        self._next: Token | None = None
        self._pending = False
        self._quote = '"'
        self._value = ""
        self._closed = False
        self.token: Token | None = None

    # ------------------------------------------------------------------ where it stands

    def current_name(self) -> str | None:
        scopes = self._scopes
        if self.token in STARTS:
            return scopes[-2].name if len(scopes) > 1 else None
        return scopes[-1].name if scopes else None

    def text(self) -> str:
        """The text of a string, name or number."""
        if self.token is Token.FIELD_NAME:
            return self._scopes[-1].name or ""
        if self._pending:
            self._pending = False
            self._value = self._string(self._quote)
        return self._value

    def base64(self) -> bytes:
        """The bytes of a string of base64. After an error the rest of the string is still to come."""
        if not self._pending:
            raise Malformed("the text was read already")
        decoded = bytearray()
        while True:
            character = self._take()
            while character and character <= " ":
                character = self._take()
            if character == self._quote:
                break
            group = [self._sextet(character, 0)]
            if group[0] is None:
                continue
            while len(group) < 4 and _PADDING not in group:
                character = self._take()
                if character == self._quote and len(group) > 1:
                    self._position -= 1
                    raise Malformed("base64 without its padding")
                group.append(self._sextet(character, len(group)))
            if len(group) == 3 and self._sextet(self._take(), 3) != _PADDING:
                raise Malformed("base64 with half a padding")
            bits = [value for value in group if value is not None and value != _PADDING]
            whole = sum(value << (18 - 6 * index) for index, value in enumerate(bits))
            decoded += whole.to_bytes(3, "big")[: len(bits) - 1]
        self._pending = False
        self._value = ""
        return bytes(decoded)

    def _take(self) -> str:
        self._position += 1
        return self._text[self._position - 1 : self._position]

    def _sextet(self, character: str, index: int) -> int | None:
        """Six bits of base64; None for an escaped blank between groups."""
        if character == "\\":
            character = self._escape()
            if index == 0 and character <= " ":
                return None
        if character == "=" and index >= 2:
            return _PADDING
        if not character or character not in _BASE64:
            raise Malformed(f"{character!r} in base64")
        return _BASE64.index(character)

    # ------------------------------------------------------------------ going on

    def next(self) -> Token | None:
        """The next token; None at the end of the text outside of everything."""
        if self.token is Token.FIELD_NAME and self._next is not None:
            self.token, self._next = self._next, None
            self._enter(self.token)
            return self.token
        if self._pending:
            self._pending = False
            self._string(self._quote)
        if self._closed:
            return None
        character = self._next_character()
        if character == "":
            if self._scopes:
                raise Malformed("the text ends inside an object or array")
            self._closed = True
            self.token = None
            return None
        if character in "]}":
            return self._leave(character)
        if self._scopes:
            character = self._after_comma(character)
            if self._scopes[-1].is_object:
                return self._name(character)
        self.token = self._begin_value(character)
        self._enter(self.token)
        return self.token

    def skip_children(self) -> None:
        """Past the object or array that begins here; nothing for other tokens."""
        if self.token in STARTS:
            self.leave_to(self.depth - 1)

    @property
    def depth(self) -> int:
        return len(self._scopes)

    def leave_to(self, depth: int) -> None:
        """Past everything that began deeper than `depth`."""
        while len(self._scopes) > depth:
            self.next()

    # ------------------------------------------------------------------ parts

    def _next_character(self) -> str:
        match = _SPACE.match(self._text, self._position)
        assert match is not None
        self._position = match.end() + 1
        return self._text[match.end() : match.end() + 1]

    def _after_comma(self, character: str) -> str:
        scope = self._scopes[-1]
        scope.count += 1
        if scope.count == 1:
            return character
        if character != ",":
            raise Malformed(f"unexpected {character!r} where a comma belongs")
        character = self._next_character()
        if character == "":
            raise Malformed("the text ends behind a comma")
        return character

    def _name(self, character: str) -> Token:
        if character not in ('"', "'"):
            raise Malformed(f"unexpected {character!r} where a name belongs")
        self._scopes[-1].name = self._string(character)
        self.token = Token.FIELD_NAME
        if self._next_character() != ":":
            raise Malformed("a name without a colon")
        character = self._next_character()
        if character == "":
            raise Malformed("a name without a value")
        self._next = None
        self._next = self._begin_value(character)
        return Token.FIELD_NAME

    def _begin_value(self, character: str) -> Token:
        if character in ('"', "'"):
            self._quote = character
            self._pending = True
            return Token.STRING
        if character == "{":
            return Token.START_OBJECT
        if character == "[":
            return Token.START_ARRAY
        return self._number_or_word()

    def _number_or_word(self) -> Token:
        begin = self._position - 1
        number = _NUMBER.match(self._text, begin)
        if number is not None:
            self._value = number[0]
            self._position = number.end()
            following = self._text[self._position : self._position + 1]
            if following.isdigit() or following in (".", "e", "E"):
                self._position += 1
                raise Malformed("a number with a leading zero, or one that ends too early")
            if len(self._value) > NUMBER_CHARACTERS_MAX:
                raise Malformed("a number with too many digits")
            return Token.FLOAT if number[1] or number[2] else Token.INT
        word = _WORDS.match(self._text, begin)
        if word is None:
            raise Malformed(f"unexpected {self._text[begin : begin + 1]!r} where a value belongs")
        self._position = word.end()
        following = self._text[self._position : self._position + 1]
        if following.isalnum() or following in ("_", "$"):
            raise Malformed(f"unknown word {word[0] + following!r}")
        self._value = word[0]
        return _WORD_TOKENS.get(word[0], Token.FLOAT)

    def _enter(self, token: Token) -> None:
        if token in STARTS:
            if len(self._scopes) >= DEPTH_MAX:
                raise Malformed(f"more than {DEPTH_MAX} levels")
            self._scopes.append(_Scope(is_object=token is Token.START_OBJECT))

    def _leave(self, character: str) -> Token:
        if not self._scopes or self._scopes[-1].is_object != (character == "}"):
            raise Malformed(f"unexpected {character!r}")
        self._scopes.pop()
        self.token = Token.END_OBJECT if character == "}" else Token.END_ARRAY
        return self.token

    def _string(self, quote: str) -> str:
        """The rest of a string whose opening quote was read."""
        plain = _PLAIN[quote]
        parts: list[str] = []
        while True:
            match = plain.match(self._text, self._position)
            assert match is not None
            parts.append(match[0])
            self._position = match.end() + 1
            character = self._text[match.end() : match.end() + 1]
            if character == quote:
                return "".join(parts)
            if character == "\\":
                parts.append(self._escape())
            elif character == "":
                self._position = len(self._text)
                raise Malformed("the text ends inside a string")
            else:
                raise Malformed("a control character inside a string")

    def _escape(self) -> str:
        character = self._text[self._position : self._position + 1]
        self._position += 1
        if character == "u":
            match = _HEX.match(self._text, self._position)
            assert match is not None
            self._position = match.end()
            if len(match[0]) < 4:
                self._position += 1
                raise Malformed("an escape that is not four hexadecimal digits")
            return chr(int(match[0], 16))
        if character not in _ESCAPES or character == "":
            raise Malformed(f"unknown escape {character!r}")
        return _ESCAPES[character]


_HALF: Final = re.compile("[\ud800-\udfff]")


def joined_surrogates(text: str) -> str:
    """Escaped pairs become one character; a half that stands alone becomes `?`, as in Java."""
    if _HALF.search(text):
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return _HALF.sub("?", whole)
    return text
