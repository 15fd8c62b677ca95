"""Runs behind URLs: listed, read by ranges, retried, and without a secret in any message."""

from __future__ import annotations

import functools
import http.client
import http.server
import io
import os
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save

from plastiscope.checkpoints import Options, blobs, discover
from plastiscope.errors import UnreadableError, UsageError

fsspec = pytest.importorskip("fsspec", reason="fsspec isn't installed")


def torch_bytes(content) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


@pytest.fixture
def memory(table):
    system = fsspec.filesystem("memory")
    for step in (1, 20, 3):
        system.pipe(f"/run/step_{step}.pt", torch_bytes(table(step)))
        system.pipe(f"/safe/checkpoint-{step}/model.safetensors", save(table(step)))
        system.pipe(f"/safe/checkpoint-{step}/config.json", b'{"model_type": "x"}')
    system.pipe("/run/step_4.pt", b"")
    yield system
    system.rm("/run", recursive=True)
    system.rm("/safe", recursive=True)


def test_memory_run_equals_local(memory, table):
    (run,) = discover("memory://run")
    assert [c.step for c in run.checkpoints] == [1, 3, 20]
    assert [(s.name, s.reason[:10]) for s in run.skipped] == [("step_4.pt", "empty file")]
    for checkpoint in run.checkpoints:
        state = checkpoint.open()
        for name, tensor in table(checkpoint.step).items():
            assert torch.equal(state.read(name), tensor)
    (run,) = discover("memory://safe")
    assert [c.step for c in run.checkpoints] == [1, 3, 20]
    assert run.checkpoints[0].open().extras["config"] == {"model_type": "x"}
    assert run.path == "memory:///safe"
    assert discover(run.path)[0].checkpoints[1].path == "memory:///safe/checkpoint-3"


def test_fingerprint_is_the_same_as_the_local_files(memory, tmp_path, table):
    torch.save(table(3), tmp_path / "x.pt")
    local = discover(tmp_path / "x.pt")[0].checkpoints[0].fingerprint
    (run,) = discover("memory://run")
    assert {c.step: c.fingerprint for c in run.checkpoints}[3] == local


class Counting:
    """A file system that remembers which ranges were fetched."""

    def __init__(self, system):
        self._system, self.ranges = system, []

    def __getattr__(self, name):
        return getattr(self._system, name)

    def cat_file(self, path, start=None, end=None):
        self.ranges.append((path, start, end))
        return self._system.cat_file(path, start=start, end=end)


def test_safetensors_fetches_its_header_and_one_tensor(memory):
    from plastiscope.checkpoints.safetensors_files import read_safetensors

    big = {"a.weight": torch.randn(1000, 1000), "b.weight": torch.randn(10, 10)}
    data = save(big)
    memory.pipe("/safe/big.safetensors", data)
    counting = Counting(memory)
    blob = blobs.RemoteBlob(counting, "/safe/big.safetensors", len(data))
    content = read_safetensors(blob)
    assert torch.equal(content.tree["b.weight"].read(), big["b.weight"])
    fetched = sum(end - start for _, start, end in counting.ranges)
    assert fetched <= 3 << 18 and fetched < len(data) / 4


def test_looking_for_a_tied_head_downloads_neither_table(memory):
    embed, head = torch.randn(40000, 64), torch.randn(40000, 64)
    data = save({"embed.weight": embed, "lm_head.weight": head, "x.bias": torch.ones(3)})
    counting = Counting(memory)
    memory.pipe("/safe/untied.safetensors", data)
    from plastiscope.checkpoints.safetensors_files import read_safetensors
    from plastiscope.checkpoints.states import make_state

    blob = blobs.RemoteBlob(counting, "/safe/untied.safetensors", len(data))
    state = make_state(read_safetensors(blob))
    assert state.tensors["lm_head.weight"].alias_of is None
    assert sum(end - start for _, start, end in counting.ranges) < len(data) / 10


def test_trusting_a_pickle_needs_a_local_file(memory):
    with pytest.raises(UsageError, match="isn't a local file: download it first"):
        discover("memory://run", Options(trust_pickle=True))


def test_missing_url_and_unknown_protocol(memory):
    with pytest.raises(UsageError, match="no such file or directory: memory://nothing"):
        discover("memory://nothing")
    with pytest.raises(UsageError, match="can't be opened"):
        discover("nosuchprotocol://x/y")


class _Plain(http.server.SimpleHTTPRequestHandler):
    """Serves files and knows nothing of ranges."""

    def log_message(self, *args):
        pass


def test_http_file_from_a_server_without_ranges(tmp_path, table):
    pytest.importorskip("aiohttp", reason="aiohttp isn't installed")
    torch.save(table(2), tmp_path / "step_2.pt")
    handler = functools.partial(_Plain, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/step_2.pt?token=secret"
        (run,) = discover(url)
        (checkpoint,) = run.checkpoints
        state = checkpoint.open()
        assert all(torch.equal(state.read(n), t) for n, t in table(2).items())
        assert (checkpoint.name, checkpoint.step) == ("step_2.pt", 2)
        assert "secret" not in repr((run, checkpoint))
    finally:
        server.shutdown()
        server.server_close()


class Failing:
    """A file system whose first reads fail, are cut short, or always fail."""

    def __init__(self, system, failures):
        self._system, self._failures, self.calls = system, list(failures), 0

    def __getattr__(self, name):
        return getattr(self._system, name)

    def cat_file(self, path, start=None, end=None):
        self.calls += 1
        failure = self._failures.pop(0) if self._failures else None
        if failure == "cut":
            return self._system.cat_file(path, start=start, end=end)[:-1]
        if failure is not None:
            raise failure
        return self._system.cat_file(path, start=start, end=end)


def test_failed_and_cut_reads_are_tried_again(memory, monkeypatch):
    monkeypatch.setattr(blobs.time, "sleep", lambda seconds: None)
    size = memory.info("/run/step_1.pt")["size"]
    system = Failing(memory, [ConnectionResetError("x"), "cut", TimeoutError("y")])
    blob = blobs.RemoteBlob(system, "/run/step_1.pt", size)
    assert blob.read(0, 4) == b"PK\x03\x04" and system.calls == 4
    assert blob.read(4, 40) and system.calls == 4


def test_lasting_failure_is_one_line_without_secrets(memory, monkeypatch):
    monkeypatch.setattr(blobs.time, "sleep", lambda seconds: None)
    secret = "https://user:hunter2@host/x.pt?X-Amz-Signature=abcdef"
    blob = blobs.RemoteBlob(Failing(memory, [OSError(secret)] * 9), secret, 100)
    with pytest.raises(UnreadableError) as raised:
        blob.read(0, 4)
    assert str(raised.value) == "https://host/x.pt: reading failed 5 times (OSError)"
    denied = blobs.RemoteBlob(Failing(memory, [PermissionError(secret)]), secret, 100)
    with pytest.raises(UnreadableError, match=r"^https://host/x\.pt: PermissionError$"):
        denied.read(0, 4)


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Passes requests on, after spoiling the ones its server was told to spoil."""

    protocol_version = "HTTP/1.1"

    def _pass(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=30)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        data = answer.read()
        ranged = self.command == "GET" and self.headers.get("Range")
        fault = self.server.faults.pop(0) if ranged and self.server.faults else None
        self.server.spoiled += fault is not None
        if fault == "slow":
            time.sleep(0.5)
        if fault == "error":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(key, value)
        size = answer.getheader("Content-Length") or len(data)
        self.send_header("Content-Length", str(size if self.command == "HEAD" else len(data)))
        self.end_headers()
        if fault == "interrupted":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815

    def log_message(self, *args):
        pass


@contextmanager
def proxy(target):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    server.target, server.faults, server.spoiled = target, [], 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def s3():
    """A bucket on moto's server, on this machine, behind a proxy that can spoil answers."""
    pytest.importorskip("s3fs", reason="s3fs isn't installed")
    moto = pytest.importorskip("moto.server", reason="moto isn't installed")
    settings = {
        "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
        "AWS_SECRET_ACCESS_KEY": "very-secret-key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {key: os.environ.get(key) for key in (*settings, "AWS_ENDPOINT_URL")}
    os.environ.update(settings)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with proxy(port) as front:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{front.server_port}"
        import s3fs

        system = s3fs.S3FileSystem()
        system.mkdir("bucket")
        yield system, front
    server.stop()
    for key, value in before.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value


def test_s3_run(s3, table):
    system, _ = s3
    for step in (1, 20, 3):
        system.pipe(f"bucket/run/step_{step}.pt", torch_bytes(table(step)))
        system.pipe(f"bucket/safe/checkpoint-{step}/model.safetensors", save(table(step)))
        system.pipe(f"bucket/safe/checkpoint-{step}/config.json", b"{}")
    system.invalidate_cache()
    for url in ("s3://bucket/run", "s3://bucket/safe"):
        (run,) = discover(url)
        assert [c.step for c in run.checkpoints] == [1, 3, 20]
        for checkpoint in run.checkpoints:
            state = checkpoint.open()
            for name, tensor in table(checkpoint.step).items():
                assert torch.equal(state.read(name), tensor)


@pytest.mark.parametrize("fault", ["slow", "interrupted", "error"])
def test_s3_spoiled_answers_are_tried_again(s3, table, fault):
    system, front = s3
    system.pipe("bucket/one/step_1.safetensors", save(table(1)))
    system.invalidate_cache()
    front.faults, front.spoiled = [fault, fault], 0
    (run,) = discover("s3://bucket/one")
    state = run.checkpoints[0].open()
    for name, tensor in table(1).items():
        assert torch.equal(state.read(name), tensor)
    assert front.spoiled == 2


def test_s3_errors_show_no_credentials(s3, capfd):
    system, front = s3
    system.pipe("bucket/bad/step_1.safetensors", save({"w": torch.ones(2)}))
    system.invalidate_cache()
    front.faults = ["error"] * 100
    with pytest.raises(UnreadableError) as raised:
        discover("s3://bucket/bad", Options(strict=True))
    front.faults = []
    output = "".join(capfd.readouterr()) + str(raised.value)
    assert "step_1.safetensors" in output and "reading failed 5 times" in output
    assert "AKIATEST" not in output and "very-secret-key" not in output
    with pytest.raises(UsageError, match="no such file or directory: s3://bucket/none"):
        discover("s3://bucket/none")
