"""`helm test`: the gateway answers, keeps its door shut, and brings a job to its end where one is given.

Told to stop (the pod's deadline, a deleted pod), it cancels that job, which would hold its devices on.
Only the standard library. TLS is not verified: the pod has no trust in the release's certificate, and the token is
the release's own.
"""

import json
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request

URL, TOKEN = os.environ["SYNCLINE_URL"], os.environ["SYNCLINE_TOKEN"]
SCRAPE = os.environ["SYNCLINE_METRICS_TOKEN"]
TRUST = ssl.create_default_context()
TRUST.check_hostname, TRUST.verify_mode = False, ssl.CERT_NONE
TERMINAL = ("succeeded", "failed", "cancelled")


def ask(path, body=None, token=TOKEN, method=None):
    """Status and answer of a request, JSON or text; a body is a job spec as TOML."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if body is not None:
        headers |= {"Content-Type": "application/toml"}
    request = urllib.request.Request(URL + path, data=body, headers=headers, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=30, context=TRUST)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in answer.headers["content-type"] else text


def expect(what, got, wanted):
    """Print one line; leave with 1 where it is not as wanted."""
    print(f"{'ok' if got == wanted else 'FAILED'}  {what}: {got}", flush=True)
    if got != wanted:
        sys.exit(1)


expect("the gateway is ready", ask("/readyz", token=None)[0], 200)
expect("jobs need a token", ask("/v1/jobs", token=None)[0], 401)
expect("a wrong token is refused", ask("/v1/jobs", token="wrong")[0], 401)
expect("the release's token opens", ask("/v1/jobs")[0], 200)
expect("Prometheus' token reads the numbers", ask("/metrics", token=SCRAPE)[0], 200)
expect("and nothing else", ask("/v1/jobs", token=SCRAPE)[0], 403)

with open(os.environ["SYNCLINE_JOB_FILE"], "rb") as file:
    spec = file.read()
if spec.strip():
    status, job = ask("/v1/jobs", body=spec)
    expect("a job is taken", (status, job.get("detail", "")), (201, ""))
    state = job["state"]

    def stop(*_):
        status, _ = ask(f"/v1/jobs/{job['id']}/cancel", method="POST")
        print(f"FAILED  told to stop; job {job['id']} cancelled: {status}", flush=True)
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    print(f"    {job['id']} {state}", flush=True)
    while state not in TERMINAL:  # the pod's deadline ends this
        time.sleep(2)
        seen = ask(f"/v1/jobs/{job['id']}")[1]
        if (seen["state"], seen.get("update")) != (state, job.get("update")):
            state, job["update"] = seen["state"], seen.get("update")
            print(f"    {job['id']} {state}, update {job['update']}", flush=True)
    expect(f"job {job['id']} ends", state, "succeeded")
