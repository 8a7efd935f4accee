"""The page as it is used: its button by gradio's client, and `g2rpo demo` as a process."""

import os
import signal
import subprocess
import sys

import httpx
import numpy as np
import pytest
from PIL import Image

from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile, profile_path
from g2rpo_core.inference.painter import Painter
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.projects import small_project
from tests.fixtures.waiting import HUNG, free_port, until

pytestmark = pytest.mark.pipeline
RUNS = ["base", "g2rpo-1", "g2rpo-2"]
PROMPT = "a large red circle above a small blue square"


@pytest.fixture(scope="module")
def project(models, tmp_path_factory):
    """A project with a run of whole weights and one of a LoRA."""
    return small_project(tmp_path_factory.mktemp("demo"), models)


def test_each_picture_is_the_one_that_generate_draws(project, monkeypatch):
    # Here, because every process that collects tests would import gradio
    from gradio_client import Client

    from g2rpo_core.inference.demo import Demo, make_page

    monkeypatch.chdir(project)
    painter = Painter(load_profile(profile_path("tiny")), project / "models" / "tiny")
    page = make_page(Demo(painter, "tiny"), RUNS)
    _, address, _ = page.launch(quiet=True, prevent_thread_lock=True)
    try:
        client = Client(address, verbose=False, download_files=str(project))
        pictures, scores = client.predict(PROMPT, RUNS, 5, api_name="/draw")
        assert [each["caption"] for each in pictures] == RUNS
        assert [row[0] for row in scores["data"]] == RUNS
        assert len({tuple(row[1:]) for row in scores["data"]}) == 3
    finally:
        page.close()
    words = [word for run in RUNS for word in ("--run", run)]
    done = run_here(main, "generate", PROMPT, *words, "--seeds", "5", folder=project)
    assert done.returncode == 0, done.stderr
    for file, picture in zip(done.stdout.split(), pictures, strict=True):
        drawn = np.asarray(Image.open(project / file))
        assert np.array_equal(np.asarray(Image.open(picture["image"])), drawn)


def test_the_command_serves_its_own_names_until_it_is_stopped(project):
    """A page of another name at this address (DNS rebinding) would read and press everything."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADIO_TEMP_DIR": str(project / "kept")}
    command = [sys.executable, "-m", "g2rpo_core.cli", "demo", "--port", str(port)]
    log = project / "demo.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=project, env=environment, stdout=output, stderr=output
        )
    try:
        until(lambda: process.poll() is not None or "Ctrl-C ends it" in log.read_text())
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
            assert client.get("/", headers={"Host": "localhost"}).status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HUNG) == 0, log.read_text()
