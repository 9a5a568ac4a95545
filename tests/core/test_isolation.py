"""Bad plugins, each installed between two good ones: what the host says, and that both still work.

Every case runs in a fresh process on a fake site-packages with real importlib.metadata discovery.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

PROBE = """
import contextlib, io, json
from zoo_core.cli import main

def zoo(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(arguments)
        except SystemExit as stop:
            assert not stop.code, stop.code
    return out.getvalue()

print("@@" + json.dumps({
    "list": json.loads(zoo("list", "--json")),
    "architectures": json.loads(zoo("list", "--architectures", "--json")),
    "plugins": json.loads(zoo("plugins", "--json")),
    "report": zoo("plugins") + zoo("list"),
}))
"""

HOOK = """
from records import *

@hookimpl
def zoo_mechanisms():
    {body}
"""


def hook(body: str) -> str:
    return HOOK.format(body=body)


@dataclass
class Bad:
    """A bad plugin and what the host must say. `adds`: mechanisms that it may add all the same."""

    code: Any
    phase: str = ""
    reason: str = ""
    adds: tuple[str, ...] = ()
    note: str = ""
    how: Any = None


BAD = {
    # at import
    "raises": Bad("raise RuntimeError('boom')", "import", "RuntimeError: boom (bad.py:1)"),
    "exits": Bad("import sys; sys.exit(3)", "import", "SystemExit: 3"),
    "exits-with-success": Bad("raise SystemExit", "import", "SystemExit"),
    "raises-keyboard-interrupt": Bad("raise KeyboardInterrupt", "import", "KeyboardInterrupt"),
    "raises-base-exception": Bad(
        "class Odd(BaseException): pass\nraise Odd('quite')", "import", "Odd: quite"
    ),
    "raises-what-cannot-be-printed": Bad(
        "class Odd(Exception):\n    def __str__(self): raise self\nraise Odd",
        "import",
        "Odd: (its text cannot be printed)",
    ),
    "raises-markup-and-escapes": Bad(
        "raise ValueError('[/red] \\x1b[2J \\ud800 one\\ntwo ' + 'x' * 1_000_000)",
        "import",
        "ValueError: [/red] [2J one two xxx",
    ),
    "recurses": Bad("def f(): f()\nf()", "import", "RecursionError"),
    "misses-a-dependency": Bad("import not_there", "import", "No module named 'not_there'"),
    "misses-its-module": Bad(None, "import", "No module named 'bad'"),
    "misses-its-object": Bad("", "import", "no attribute 'gone'", how={"bad": "bad:gone"}),
    "syntax-error": Bad("def (", "import", "SyntaxError"),
    "source-not-utf8": Bad(b"x = '\xff'", "import", "SyntaxError"),
    "value-is-no-object": Bad("", "metadata", "'bad module!' is not", how={"bad": "bad module!"}),
    "asks-the-registry": Bad("import zoo_core; zoo_core.mechanisms()", "import", "still loading"),
    "registers-at-import": Bad(
        "import zoo_core\nfrom records import *\nzoo_core.register(mechanism('mine'))",
        "import",
        "still loading",
    ),
    "assigns-to-another-record": Bad(
        "from aa_good import RECORD\nRECORD.name = 'stolen'", "import", "FrozenInstanceError"
    ),
    # at registration
    "implements-nothing": Bad("x = 1", "register", "module bad implements no hook"),
    "forgets-the-decorator": Bad("def zoo_mechanisms(): return []", "register", "hookimpl"),
    "misspells-a-hook": Bad(
        "from records import *\n@hookimpl\ndef zoo_mechanism(): return []",
        "register",
        "unknown hook 'zoo_mechanism'",
    ),
    "wants-an-unknown-argument": Bad(
        "from records import *\n@hookimpl\ndef zoo_mechanisms(config): return []",
        "register",
        "config",
    ),
    "class-with-arguments": Bad(
        "class Plugin:\n    def __init__(self, config): pass",
        "register",
        "missing 1 required positional argument: 'config'",
        how={"bad": "bad:Plugin"},
    ),
    "entry-point-to-a-record": Bad(
        "from records import *\nRECORD = mechanism('x')",
        "register",
        "Mechanism bad:RECORD implements no hook",
        how={"bad": "bad:RECORD"},
    ),
    # in a hook
    "raises-in-mechanisms": Bad(hook("1 / 0"), "zoo_mechanisms", "ZeroDivisionError"),
    "exits-in-mechanisms": Bad(hook("raise SystemExit(1)"), "zoo_mechanisms", "SystemExit: 1"),
    "interrupts-in-mechanisms": Bad(
        hook("raise KeyboardInterrupt"), "zoo_mechanisms", "KeyboardInterrupt"
    ),
    "raises-in-architectures": Bad(
        hook("return [mechanism('kept')]")
        + "\n@hookimpl\ndef zoo_architectures(): raise OSError('no disk')",
        "zoo_architectures",
        "OSError: no disk",
        adds=("kept",),
    ),
    "raises-in-catalogues": Bad(
        hook("return [mechanism('kept')]") + "\n@hookimpl\ndef zoo_catalogues(): 1 / 0",
        "zoo_catalogues",
        "ZeroDivisionError",
        adds=("kept",),
    ),
    "catalogue-not-absolute": Bad(
        "from records import *\n@hookimpl\ndef zoo_catalogues(): return ['registry.toml', 3]",
        "zoo_catalogues",
        "returned 'registry.toml' where an absolute path belongs",
    ),
    "catalogue-missing": Bad(
        "from records import *\n@hookimpl\ndef zoo_catalogues(): return ['/nowhere/x.toml']",
        "zoo_catalogues",
        "/nowhere/x.toml: cannot be read",
    ),
    "returns-none": Bad(hook("return None"), "zoo_mechanisms", "returned None, must return a list"),
    "returns-one-record": Bad(
        hook("return mechanism('x')"), "zoo_mechanisms", "returned a Mechanism, must return a list"
    ),
    "returns-a-name": Bad(hook("return 'softmax'"), "zoo_mechanisms", "returned a str, must"),
    "returns-a-dict": Bad(
        hook("return {'x': mechanism('x')}"), "zoo_mechanisms", "returned a dict, must"
    ),
    "is-a-coroutine": Bad(
        hook("return []").replace("def ", "async def "), "zoo_mechanisms", "returned a coroutine"
    ),
    "yields-none-and-numbers": Bad(
        hook("yield from [None, 7, mechanism('kept')]"),
        "zoo_mechanisms",
        "returned a NoneType where a Mechanism belongs",
        adds=("kept",),
    ),
    "returns-an-architecture": Bad(
        hook("return [architecture('x')]"), "zoo_mechanisms", "returned a Architecture where"
    ),
    "returns-a-subclass": Bad(
        "class Sly(__import__('zoo_core').Mechanism): pass\n"
        + hook("r = mechanism('x'); return [Sly(**vars(r))]"),
        "zoo_mechanisms",
        "returned a Sly where a Mechanism belongs",
    ),
    "raises-half-way": Bad(
        hook("yield mechanism('half'); raise ValueError('late')"), "zoo_mechanisms", "late"
    ),
    "never-ends": Bad(
        hook("while True: yield mechanism('again')"),
        "zoo_mechanisms",
        "returned more than 1000 records",
    ),
    "same-name-twice": Bad(
        hook("return [mechanism('kept'), mechanism('kept', family='other')]"),
        "zoo_mechanisms",
        "'kept' is offered twice",
        adds=("kept",),
    ),
    # malformed records
    "api-99": Bad(
        hook("return [mechanism('new', api=99), mechanism('kept')]"),
        "zoo_mechanisms",
        "'new' is written for api 99, this zoo-core supports 1",
        adds=("kept",),
    ),
    "api-is-text": Bad(hook("return [mechanism('x', api='1')]"), "zoo_mechanisms", "api '1'"),
    "nameless": Bad(hook("return [mechanism('')]"), "zoo_mechanisms", "name ''"),
    "name-missing": Bad(
        "from zoo_core import Mechanism\nMechanism(summary='')", "import", "missing"
    ),
    "name-none": Bad(hook("return [mechanism(None)]"), "zoo_mechanisms", "name None"),
    "name-not-ascii": Bad(hook("return [mechanism('añ')]"), "zoo_mechanisms", "lower_snake ASCII"),
    "name-very-long": Bad(
        hook("return [mechanism('x' * 10_000)]"), "zoo_mechanisms", "at most 64 characters"
    ),
    "summary-none": Bad(
        hook("return [mechanism('x', summary=None)]"), "zoo_mechanisms", "summary must be"
    ),
    "supports-dict": Bad(
        hook("return [mechanism('x', supports={})]"), "zoo_mechanisms", "supports must be"
    ),
    "options-instance": Bad(
        hook("return [mechanism('x', options=NoOptions())]"), "zoo_mechanisms", "options must be"
    ),
    "aliases-text": Bad(
        hook("return [mechanism('x', aliases='abc')]"), "zoo_mechanisms", "aliases must be"
    ),
    "factory-missing": Bad(
        hook("return [mechanism('x', factory=None)]"), "zoo_mechanisms", "factory must be callable"
    ),
    "rewritten-after-its-checks": Bad(
        hook("r = mechanism('x'); object.__setattr__(r, 'family', 3); return [r]"),
        "zoo_mechanisms",
        "family must be a string",
    ),
    # damaged metadata
    "entry-points-damaged": Bad(
        "", "metadata", "entry_points.txt cannot be read", how=b"[zoo_core.plugins]\nno value\n"
    ),
    "entry-points-not-utf8": Bad(
        "", "metadata", "entry_points.txt cannot be read", how=b"[zoo_core.plugins]\nb\xff = bad\n"
    ),
    # allowed, but noted
    "slow": Bad(
        "import time; time.sleep(0.6)" + hook("return [mechanism('kept')]"),
        adds=("kept",),
        note="s to load",
    ),
    "imports-torch": Bad(
        "import torch" + hook("return [mechanism('kept')]"), adds=("kept",), note="imports torch"
    ),
    # sound, though it looks bad
    "prints": Bad(
        "import os, sys; print('hello'); sys.stdout.write('there')"
        + hook("print('again'); return [mechanism('kept')]"),
        adds=("kept",),
    ),
    "prints-behind-our-back": Bad(
        "import os, sys; os.system('echo hello'); os.write(1, b'there')\n"
        "sys.__stdout__.write('again')" + hook("return [mechanism('kept')]"),
        adds=("kept",),
    ),
    "replaces-stdout": Bad(
        "import io, sys; sys.stdout = io.StringIO()" + hook("return [mechanism('kept')]"),
        adds=("kept",),
    ),
    "name-unlike-its-distribution": Bad(hook("return [mechanism('other')]"), adds=("other",)),
    "class": Bad(
        "from records import *\nclass Plugin:\n    @hookimpl\n    def zoo_mechanisms(self):\n"
        "        return [mechanism('kept')]",
        adds=("kept",),
        how={"bad": "bad:Plugin"},
    ),
    "instance-with-a-raising-property": Bad(
        "from records import *\nclass Plugin:\n    @property\n    def trap(self): raise OSError\n"
        "    @hookimpl\n    def zoo_mechanisms(self):\n        return [mechanism('kept')]\n"
        "plugin = Plugin()",
        adds=("kept",),
        how={"bad": "bad:plugin"},
    ),
    "lazy-module": Bad(
        hook("return [mechanism('kept')]")
        + "\ndef __dir__(): return ['zoo_mechanisms', 'heavy']\ndef __getattr__(name): 1 / 0",
        adds=("kept",),
    ),
    "rewrites-another-record": Bad(
        "from aa_good import RECORD\nobject.__setattr__(RECORD, 'name', 'stolen')"
        + hook("return [mechanism('kept')]"),
        adds=("kept",),
    ),
    "same-record-twice": Bad(
        hook("return [mechanism('kept')] * 2"), adds=("kept",), how={"bad": "bad", "b2": "bad"}
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_plugin_is_recorded_and_silences_nobody(fake_site, bad):
    good = "RECORD = mechanism({name!r})\n@hookimpl\ndef zoo_mechanisms(): return [RECORD]"
    for name in ("aa_good", "zz_good"):
        fake_site.install(name, "from records import *\n" + good.format(name=name))
    how = {"entry_points" if isinstance(bad.how, bytes) else "entries": bad.how}
    fake_site.install("bad", bad.code, version="6.6.6", **how)
    (fake_site.path / "torch.py").touch()

    run = fake_site.run("-c", PROBE)

    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("@@"), "a plugin's output reached stdout"
    seen = json.loads(run.stdout.removeprefix("@@"))
    names = {row["name"] for row in seen["list"] if row["distribution"] != "zoo-core"}
    assert names == {"aa_good", "zz_good", *bad.adds}
    assert "softmax" in {row["name"] for row in seen["list"]}
    rows = [row for row in seen["plugins"] if row["distribution"] == "bad"]
    failures = [failure for row in rows for failure in row["failures"]]
    assert {row["version"] for row in rows} == {"6.6.6"}
    if bad.phase:
        assert failures[0]["phase"] == bad.phase
        assert bad.reason in failures[0]["reason"]
        assert len(failures[0]["reason"]) < 400
        assert "bad" in seen["report"]
    else:
        assert failures == []
    assert bad.note in " ".join(note for row in rows for note in row["notes"])
    assert bool(bad.note) == any(row["notes"] for row in rows)
