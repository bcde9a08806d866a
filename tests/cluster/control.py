"""A real control plane on loopback: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, as processes."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import httpx
from waiting import wait_until

CONTROLLERS = (
    "deployment,replicaset,statefulset,job,garbagecollector,disruption,endpoint,namespace,serviceaccount,"
    "persistentvolume-binder,resourcequota,daemonset,cronjob"
)
Body = dict[str, Any]


def tools() -> Path:
    """Where the binaries are kept; `make test-cluster` puts them there."""
    given = os.environ.get("SYNCLINE_TOOLS")
    return Path(given) if given else Path.home() / ".cache" / "syncline"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Rest:
    """The API server as one user. Raises `httpx.HTTPStatusError` for anything but success."""

    def __init__(self, url: str, token: str, authority: Path) -> None:
        self.url, self.token, self.authority = url, token, authority
        self.http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            verify=ssl.create_default_context(cafile=str(authority)),
            timeout=httpx.Timeout(30.0),
        )

    def send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        kind: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Body:
        headers = {"content-type": kind}
        answer = self.http.request(method, path, json=body, headers=headers, params=dict(query or {}))
        if answer.is_error:
            raise httpx.HTTPStatusError(
                f"{method} {path}: {answer.text}", request=answer.request, response=answer
            )
        found: Body = answer.json()
        return found

    def close(self) -> None:
        self.http.close()

    def get(self, path: str, **query: str) -> Body:
        return self.send("GET", path, query=query)

    def items(self, path: str, **query: str) -> list[Body]:
        found: list[Body] = self.get(path, **query)["items"]
        return found

    def make(self, path: str, body: Body) -> Body:
        """Create it, or leave what is there."""
        try:
            return self.send("POST", path, body)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 409:
                raise
            return body

    def patch(self, path: str, body: Body) -> Body:
        return self.send("PATCH", path, body, "application/merge-patch+json")

    def kubeconfig(self, path: Path, namespace: str) -> Path:
        """A kubeconfig file of this user."""
        import yaml

        cluster = {"server": self.url, "certificate-authority": str(self.authority)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": self.token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(config))
        return path


class ControlPlane:
    """Started on free ports of 127.0.0.1, with a folder of its own that goes with it."""

    def __init__(self) -> None:
        self.binaries = tools() / "kube-1.20.2"
        if not (self.binaries / "kube-apiserver").exists():
            raise FileNotFoundError(
                f"no control plane in {self.binaries}: run `make test-cluster`, which builds it"
            )
        self.folder = Path(tempfile.mkdtemp(prefix="sl-kube-"))
        self._running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._token = secrets.token_hex(16)
        self._port = free_port()
        self.url = f"https://127.0.0.1:{self._port}"

    def start(self) -> ControlPlane:
        peers, clients = free_port(), free_port()
        key = self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        users = self.folder / "users.csv"
        users.write_text(f'{self._token},admin,admin,"system:masters"\n')
        etcd = f"http://127.0.0.1:{clients}"
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-cluster=default=http://127.0.0.1:{peers}",
            "--unsafe-no-fsync",
        )
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self._port}",
            "--insecure-port=0",
            f"--cert-dir={self.folder / 'certs'}",
            f"--token-auth-file={users}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://cluster.test",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
        )
        authority = self.folder / "certs" / "apiserver.crt"
        wait_until(authority.exists, 120, "the API server's certificate", every=0.2)
        self.admin = Rest(self.url, self._token, authority)
        wait_until(self._answers, 120, "the API server is ready", every=0.3)
        config = str(self.admin.kubeconfig(self.folder / "admin.yaml", "default"))
        more = (
            "--leader-elect=false",
            "--port=0",
            f"--kubeconfig={config}",
            f"--cert-dir={self.folder / 'certs'}",
        )
        self._run(
            "kube-controller-manager",
            *more,
            f"--controllers={CONTROLLERS}",
            f"--service-account-private-key-file={key}",
            f"--secure-port={free_port()}",
            "--pvclaimbinder-sync-period=1s",
        )
        self._run("kube-scheduler", *more, f"--secure-port={free_port()}")
        wait_until(lambda: self._there("/api/v1/namespaces/default"), 60, "namespace default", every=0.2)
        return self

    def restart_server(self) -> None:
        """A new API server in the old one's place, which remembers no changes from before its start."""
        process, log = self._running.pop(1)
        process.kill()
        process.wait()
        log.close()
        self._run(*process.args)  # type: ignore[misc]
        self._running.insert(1, self._running.pop())
        wait_until(self._answers, 120, "the API server is ready again", every=0.3)

    def account(self, namespace: str, name: str) -> Rest:
        """The API server as a service account sees it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 7200},
        }
        token = self.admin.send("POST", path, asked)["status"]["token"]
        return Rest(self.url, token, self.admin.authority)

    def stop(self) -> None:
        self.admin.close()
        for process, log in reversed(self._running):
            process.kill()
            process.wait()
            log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _run(self, name: str, *words: str) -> None:
        log = (self.folder / f"{Path(name).name}.log").open("ab")
        command = [str(self.binaries / name), *words]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
        self._running.append((child, log))

    def _answers(self) -> bool:
        dead = [process.args for process, _ in self._running if process.poll() is not None]
        assert not dead, dead
        return self._there("/readyz")

    def _there(self, path: str) -> bool:
        try:
            return not self.admin.http.get(path).is_error
        except httpx.TransportError:
            return False
