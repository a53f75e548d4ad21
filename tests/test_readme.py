"""Every command and program that the READMEs show is run, as shown, and both say the same."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README.zh.md")


def blocks(readme: str, language: str) -> list[str]:
    text = (ROOT / readme).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(readme: str) -> list[str]:
    return [line for block in blocks(readme, "sh") for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="session")
def ran(default_model: str) -> dict[str, str]:
    """Output of every command of the READMEs, each run once."""
    outputs = {}
    for command in dict.fromkeys(c for readme in READMES for c in commands(readme)):
        words = shlex.split(command)
        assert words[0] == "seethrough", f"not a command of ours: {command}"
        done = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, timeout=120, cwd=ROOT
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs[command] = done.stdout
    return outputs


def test_there_are_commands_to_run() -> None:
    assert len(commands("README.md")) >= 8
    assert len(blocks("README.md", "python")) == 1


def test_both_languages_show_the_same_commands() -> None:
    assert commands("README.md") == commands("README.zh.md")


def test_commands_run(ran: dict[str, str]) -> None:
    first = commands("README.md")[0]
    assert ran[first].startswith("Neural") or ran[first].lstrip().startswith("a monthly newsletter")
    for command, output in ran.items():
        assert output.strip() or "--out" in command, command


def test_make_run_is_what_the_readme_says() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^run:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert recipe is not None
    assert commands("README.md")[0] in recipe.group(1)


@pytest.mark.parametrize("readme", READMES)
def test_python_block_runs(readme: str, default_model: str) -> None:
    (program,) = blocks(readme, "python")
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    assert "a monthly newsletter that provides exclusive content" in done.stdout


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if not t.startswith("http")]
    assert targets
    missing = [t for t in targets if not (ROOT / t).exists()]
    assert not missing
