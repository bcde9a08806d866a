"""`helm test`: the gateway answers, keeps its door shut, and brings a job to its end where one is given.

Only the standard library. TLS is not verified: the pod has no trust in the release's certificate, and the token is
the release's own.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

URL, TOKEN = os.environ["SYNCLINE_URL"], os.environ["SYNCLINE_TOKEN"]
TRUST = ssl.create_default_context()
TRUST.check_hostname, TRUST.verify_mode = False, ssl.CERT_NONE
TERMINAL = ("succeeded", "failed", "cancelled")


def ask(path, body=None, token=TOKEN):
    """Status and JSON answer of a request; a body is a job spec as TOML."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if body is not None:
        headers |= {"Content-Type": "application/toml"}
    request = urllib.request.Request(URL + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30, context=TRUST) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def expect(what, got, wanted):
    """Print one line; leave with 1 where it is not as wanted."""
    print(f"{'ok' if got == wanted else 'FAILED'}  {what}: {got}", flush=True)
    if got != wanted:
        sys.exit(1)


expect("the gateway is ready", ask("/readyz", token=None)[0], 200)
expect("jobs need a token", ask("/v1/jobs", token=None)[0], 401)
expect("a wrong token is refused", ask("/v1/jobs", token="wrong")[0], 401)
expect("the release's token opens", ask("/v1/jobs")[0], 200)

with open(os.environ["SYNCLINE_JOB_FILE"], "rb") as file:
    spec = file.read()
if spec.strip():
    status, job = ask("/v1/jobs", body=spec)
    expect("a job is taken", (status, job.get("detail", "")), (201, ""))
    state = job["state"]
    while state not in TERMINAL:  # the pod's deadline ends this
        time.sleep(2)
        seen = ask(f"/v1/jobs/{job['id']}")[1]
        if (seen["state"], seen.get("update")) != (state, job.get("update")):
            state, job["update"] = seen["state"], seen.get("update")
            print(f"    {job['id']} {state}, update {job['update']}", flush=True)
    expect(f"job {job['id']} ends", state, "succeeded")
