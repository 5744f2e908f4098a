"""A model that the hub has, one that it has not, and a hub that does not answer."""

import http.server
import json
import os
import shlex
import subprocess
import sys
import threading

import huggingface_hub.constants
import pytest

from study.core import shapes
from study.core.errors import FULL_INSTALL, Stop
from study.predict.architecture import named
from tests.conftest import python

UNREACHABLE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2"}
LLAMA = shapes.config_of("llama-micro")


def estimate(*words: str, env: dict) -> subprocess.CompletedProcess:
    return python("-m", "study.cli", "estimate", "--model", *words, env=os.environ | env)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as it takes to hand out one config.json."""

    def do_GET(self):
        has = self.path == "/meta/llama-of-mine/resolve/main/config.json"
        body = json.dumps(LLAMA).encode() if has else b""
        headers = {"ETag": '"1"', "X-Repo-Commit": "0" * 40} if has else {"X-Error-Code": "RepoNotFound"}
        self.send_response(200 if has else 404)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def hub_env(tmp_path):
    """An environment in which there is such a hub, with an empty cache."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
        server.shutdown()


def test_what_the_hub_has_is_predicted_and_kept(hub_env):
    """Also when the hub has gone."""
    words = ("meta/llama-of-mine", "--checkpointing", "--json")
    done, again = (estimate(*words, env=env) for env in (hub_env, hub_env | UNREACHABLE))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == named("llama-micro").parameters
    assert again.stdout == done.stdout


def test_what_the_hub_has_not_is_a_sentence(hub_env):
    done = estimate("google/gemma-2-9c", env=hub_env)
    assert done.returncode == 2
    for words in ("not a built-in shape", "RepositoryNotFound", "gemma2-9b"):
        assert words in done.stderr


TOO_MUCH = "CUDA out of memory. Tried to allocate 7.83 GiB"
WITHOUT_PACKAGE = "import sys; sys.modules['huggingface_hub'] = None; from study.cli import main; main()"


@pytest.mark.parametrize("without", [False, True], ids=["full", "light"])
@pytest.mark.parametrize("command", ["advise --gpus 8 --gpu A100", "estimate", "virtual", f"oom '{TOO_MUCH}'"])
def test_a_misspelt_model_is_asked_about_in_every_install(command, without):
    """The names that are near are in the study itself."""
    words = [*shlex.split(command), "--model", "lama3-8b"]
    start = ["-c", WITHOUT_PACKAGE] if without else ["-m", "study.cli"]
    done = python(*start, *words, env=os.environ | UNREACHABLE)
    assert done.returncode == 2
    assert "did you mean 'llama3-8b'" in done.stderr


def test_another_name_says_what_would_ask_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Stop, match="huggingface_hub, which asks it, is not installed") as caught:
        named("someone/else")
    assert FULL_INSTALL in caught.value.remedy


# --- whether it answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://127.0.0.1:port"])
def test_a_hub_that_cannot_be_reached_is_not_asked(address, monkeypatch, tmp_path):
    """The libraries are told so by the constant that they ask."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    shapes.try_to_connect.cache_clear()
    shapes.prepare_to_load(str(tmp_path))
    assert not shapes.is_offline(), "nobody was asked: it is a local folder"
    shapes.prepare_to_load("google/gemma-2-9b")
    shapes.try_to_connect.cache_clear()
    assert huggingface_hub.is_offline_mode()
    with pytest.raises(OSError) as caught:
        huggingface_hub.hf_hub_download("google/gemma-2-9b", "config.json", cache_dir="/nonexistent")
    assert shapes.why_not_loaded("google/gemma-2-9b", caught.value).startswith("the hub does not answer")
