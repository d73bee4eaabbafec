"""Models on a hub: a server on this machine speaks the part of its protocol that is needed, and counts what is sent."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gguftools.conversion.remote import fetched, local_name
from gguftools.conversion.run import convert
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from tests.gguftools.test_convert import make, save, stored, weights

pytest.importorskip("huggingface_hub")

COMMIT = "a" * 40
REPO = "org/Tiny-1B"


class Hub(BaseHTTPRequestHandler):
    """Lists files, and gives them whole or by ranges; `server.sent` counts bytes of each."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, body):
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{REPO}"):
            names = [{"rfilename": name} for name in self.server.files]
            self.send(json.dumps({"id": REPO, "sha": COMMIT, "siblings": names}).encode(), {}, body)
            return
        name = path.removeprefix(f"/{REPO}/resolve/").partition("/")[2]
        if not path.startswith(f"/{REPO}/resolve/") or name not in self.server.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if path.startswith(f"/{REPO}") else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = self.server.files[name]
        tag = hashlib.sha256(data).hexdigest()
        self.send(data, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}, body, name)

    def send(self, data, headers, body, name=None):
        total = len(data)
        span = self.headers.get("Range")
        if span and body:
            lo, _, hi = span.removeprefix("bytes=").partition("-")
            lo, hi = int(lo), min(int(hi or total - 1), total - 1)
            data = data[lo : hi + 1]
            headers = headers | {"Content-Range": f"bytes {lo}-{hi}/{total}"}
        self.send_response(206 if span and body else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)
            if name:
                self.server.sent[name] = self.server.sent.get(name, 0) + len(data)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Function files -> server."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    servers = []

    def serve(folder):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        server.files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        server.sent = {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server, f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def shards(folder):
    """A model in two shards, a third with a vision part, and what is not needed."""
    tensors = weights("BF16")
    names = list(tensors)
    vision = {"vision_tower.x": stored(tensors[names[0]][1].astype("f4"), "F32")}
    make(folder, tensors)
    (folder / "model.safetensors").unlink()
    parts = [{n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}, vision]
    place = {}
    for i, part in enumerate(parts, 1):
        name = f"model-0000{i}-of-00003.safetensors"
        save(folder / name, part)
        place |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    (folder / "pytorch_model.bin").write_bytes(b"x" * 100_000)
    save(folder / "consolidated.safetensors", tensors)
    return folder


def test_only_what_is_needed(tmp_path, hub):
    folder = shards(tmp_path / "m")
    server, url = hub(folder)
    expected = convert(folder, tmp_path / "local.gguf", "f16").output
    with fetched(REPO, endpoint=url) as remote:
        done = convert(remote, tmp_path / "remote.gguf", "f16").output
    assert not remote.exists()
    local, there = GGUF(expected), GGUF(done)
    assert {t.name: bytes(t.data) for t in there.tensors.values()} == {
        t.name: bytes(t.data) for t in local.tensors.values()
    }
    assert there.metadata["general.name"] == "Tiny 1B"
    assert "pytorch_model.bin" not in server.sent
    assert "consolidated.safetensors" not in server.sent
    vision = "model-00003-of-00003.safetensors"
    assert server.sent.get(vision, 0) < 200_000 < len(server.files[vision])


def test_a_plan_reads_headers_only(tmp_path, hub):
    folder = make(tmp_path / "m", weights("BF16"))
    save(folder / "model.safetensors", weights("BF16") | {"pad": stored(weights()["model.norm.weight"][1], "F32")})
    server, url = hub(folder)
    with (
        fetched(REPO, weights=False, endpoint=url) as remote,
        pytest.raises(GGUFError, match="no place for tensor 'pad'"),
    ):
        convert(remote, tmp_path / "x.gguf")
    with pytest.raises(GGUFError, match="no place for tensor 'pad'"), fetched(REPO, endpoint=url):
        pass
    assert server.sent["model.safetensors"] <= 2 * 110_000  # the header, not the weights


def test_what_a_hub_answers(tmp_path, hub):
    _, url = hub(make(tmp_path / "m"))
    for repo, message in (
        ("tiny", "no name of a model on the hub"),
        ("../../etc/passwd", "no name of a model"),
        ("org/nothing", "org/nothing: .*"),
    ):
        with pytest.raises(GGUFError, match=message) as caught, fetched(repo, endpoint=url):
            pass
        assert "\n" not in str(caught.value)
    assert local_name(REPO) == "org-Tiny-1B-{ftype}.gguf"


def test_files_that_lead_elsewhere(tmp_path, hub):
    server, url = hub(make(tmp_path / "m", weights("BF16")))
    server.files |= {"../../evil.json": b"{}", "/etc/evil.json": b"{}", "sub/config.json": b"{}"}
    with fetched(REPO, weights=False, endpoint=url) as folder:
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert not list(tmp_path.rglob("evil.json"))


def test_command(tmp_path, hub, monkeypatch, capsys):
    from gguftools.cli import main

    folder = make(tmp_path / "m", weights("BF16"))
    _, url = hub(folder)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"  # what HF_ENDPOINT sets at import
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "--remote", REPO, "--outtype", "q8_0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == "org-Tiny-1B-q8_0.gguf"
    local = convert(folder, tmp_path / "local.gguf", "q8_0").output
    assert [bytes(t.data) for t in GGUF(tmp_path / "org-Tiny-1B-q8_0.gguf").tensors.values()] == [
        bytes(t.data) for t in GGUF(local).tensors.values()
    ]
    assert main(["convert", "--remote", REPO, "-o", "dry.gguf", "--dry-run"]) == 0
    assert main(["convert", "--remote", "org/none"]) == 1
    assert capsys.readouterr().err.startswith("error: org/none: ")
