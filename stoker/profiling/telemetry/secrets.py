"""Masks secrets in commands and variables before they are recorded.

Names decide (`--token X`, `DB_PASSWORD=X`, `"apiKey": "X"`, `?sig=X`), then forms that show by themselves that they are
secret: users and passwords in URLs, `Bearer X`, addresses of webhooks, keys with the prefix of their provider. The
lists follow detect-secrets, gitleaks and Sentry. What is doubtful is masked: a record with too little is read, one with
a password has to be deleted. The time is proportional to the length of the text.
"""

import re
from collections.abc import Iterable

MASK = "***"

_WORDS = frozenset({
    "pass", "passin", "passout", "passcode", "passw", "pwd", "pw", "secret", "secrets", "token", "auth", "oauth",
    "authorization", "credential", "credentials", "cred", "creds", "cookie", "cookies", "signature", "sig", "jwt",
    "webhook", "webhooks", "passwords", "userpwd",
})  # fmt: skip
"""Words of a name that make it secret. Not `tokens`: `--max-tokens`."""
_PARTS = ("password", "passwd", "passphrase", "secret", "credential")
"""The same as parts of a word: `PGPASSWORD`."""
_ENDS = ("token", "apikey", "accesskey", "secretkey", "privatekey", "accountkey", "authkey", "signingkey", "pwd",
         "dbpass", "sshpass", "userpass", "keypass", "storepass")  # fmt: skip
"""The same as ends of a name, written without separators: `GITHUBTOKEN`."""
_NOT_SECRET = re.compile(
    r"(?:OLD)?PWD|(?:\w+[-_.])?(?:num|n|max|min|by|first|second|forward|backward|single|multi)[-_]?pass"
)
_NAME_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_ASSIGNMENT = re.compile(
    r"(?P<dashes>(?<![\w-])-{1,2}(?=\w))?(?<!\w)(?P<name>[A-Za-z_][\w.-]{0,60})"
    r"(?:\\{0,4}[\"']?\]?\s{0,8}(?P<sign>:=|=>|[:=])\s{0,8}|(?(dashes)(?P<gap>[\s\0]\s{0,8})|(?!)))"
)
"""`name=`, `name: `, `"name": `; a flag also before a space or before the next argument (NUL)."""
_QUOTED = re.compile(r"\\{0,4}\"(?:[^\"\\\0]|\\[^\0])*\"?|'[^'\0]*'?")
_WORD, _QUERY_VALUE = re.compile(r"[^\s\0]*"), re.compile(r"[^\s\0&#\"']*")
_ARGUMENT, _HEADER_VALUE = re.compile(r"[^\0]*"), re.compile(r"[^\0\n\"']*")

_FORMS = (
    (re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^\0]*?(?:-----END [A-Z ]{0,30}-----|(?=\0)|\Z)"), MASK),
    (re.compile(r"(?<=://)[^/?#\s\0]{1,500}(?=@)"), MASK),
    (re.compile(r"(?<![\w.:/-])([\w.-]{1,64}:)[^\s:/@\0]{1,256}(?=@[\w(])"), rf"\1{MASK}"),
    (
        re.compile(r"(https?://[^\s'\"\0]{0,200}?(?:\bhooks?\.|webhook)[^\s/'\"\0]{0,200}/)[^\s'\"\0]+", re.IGNORECASE),
        rf"\1{MASK}",
    ),  # the address of a webhook is its password: hooks.slack.com/…, discord.com/api/webhooks/…
    (re.compile(r"(/bot\d{1,20}:)[\w-]+"), rf"\1{MASK}"),
    (re.compile(r"\b(bearer[\s\0]{1,8})[^\s\0\"']+", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(r"(?<![^\s\0])((?:-u|--user|--proxy-user)[\s\0=]?[^\s\0:\"'=/-][^\s\0:\"'/]{0,99}:)[^\s\0\"']+"),
        rf"\1{MASK}",
    ),  # curl
    (re.compile(r"((?<![\w.-])(?:mysql\w{0,20}|mariadb[\w-]{0,20}|sshpass)[\s\0](?:[^|;&]{0,300}?[\s\0])?-p)[^\s\0]+"),
     rf"\1{MASK}"),
    (
        re.compile(
            r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{20,}|xox[abeoprs]-[\w-]{10,}|"
            r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b|AIza[\w-]{30,}|ya29\.[\w-]{10,}|sk-[\w-]{20,}|"
            r"[rs]k_(?:live|test)_\w{10,}|SG\.[\w-]{16,}\.[\w-]{16,}|npm_\w{30,}|pypi-[\w-]{30,}|do[opr]_v1_\w{40,}|"
            r"dapi[0-9a-f]{32}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
        ),
        MASK,
    ),  # keys with the prefix of their provider, as in gitleaks.toml
)  # fmt: skip


def is_secret_name(name: str) -> bool:
    """Whether a variable, flag or field of this name holds a secret: `HF_TOKEN`, `dbPassword`, `sig`."""
    if _NOT_SECRET.fullmatch(name):
        return False
    words = [word.lower() for word in _NAME_WORD.findall(name)]
    joined = "".join(words)
    return (
        not _WORDS.isdisjoint(words)
        or words[-1:] == ["key"]
        or words[-2:] == ["key", "id"]
        or name.endswith("_PAT")
        or joined.endswith(_ENDS)
        or any(part in joined for part in _PARTS)
    )


def mask_secrets(text: str) -> str:
    """The text without secrets: `s3://***@host/…`, `…?sig=***`, `password=***`."""
    masked = _mask_named_values(text)
    for pattern, replacement in _FORMS:
        masked = pattern.sub(replacement, masked)
    return masked


def mask_argv(argv: Iterable[str]) -> list[str]:
    """A command without secrets, also those in an argument of its own: `--token X`, `-p X`."""
    args = list(argv)
    return mask_secrets("\0".join(args)).split("\0") if args else []


def _mask_named_values(text: str) -> str:
    pieces: list[str] = []
    done = position = 0
    while (match := _ASSIGNMENT.search(text, position)) is not None:
        position = match.end("name")
        is_p = match["dashes"] == "-" and match["name"] == "p"  # `docker login -p X`
        if not (is_p or is_secret_name(match["name"])):
            continue
        start, end = match.end(), _value_end(text, match)
        if end > start:
            pieces += [text[done:start], MASK]
            done = position = end
    return "".join([*pieces, text[done:]])


def _value_end(text: str, match: re.Match[str]) -> int:
    """Where the value ends that begins at the end of `match`; its start for a flag without a value."""
    start, first = match.end(), match.start()
    before = text[first - 1] if first else "\0"
    if match["gap"] is not None:
        if text.startswith("--", start):
            return start
        pattern = _ARGUMENT if "\0" in match["gap"] else _QUOTED if _QUOTED.match(text, start) else _WORD
    elif before == "\0" and match["sign"] == "=":
        pattern = _ARGUMENT
    elif _QUOTED.match(text, start):
        pattern = _QUOTED
    elif before in "?&#":
        pattern = _QUERY_VALUE
    else:
        pattern = _HEADER_VALUE if ":" in match["sign"] else _WORD
    found = pattern.match(text, start)
    return start if found is None else found.end()
