"""A model that the hub has, one that it has not, and a hub that does not answer."""

import http.server
import json
import os
import subprocess
import threading

import huggingface_hub.constants
import pytest

from study.core import shapes
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
