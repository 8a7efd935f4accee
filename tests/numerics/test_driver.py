"""The NVIDIA driver: what its module and nvidia-smi write, and what a user is told."""

import pytest

from g2rpo_core.numerics import driver

SAID = {  # /proc/driver/nvidia/version
    "535.129.03": (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
        "GCC version:  gcc 11.4.0"
    ),
    "580.159.04": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  "
        "(dvs-builder@U22-I3-AF03)\n"
    ),
}


@pytest.mark.parametrize("version", SAID)
def test_the_version_is_read_from_what_the_module_says(version, tmp_path):
    (tmp_path / "version").write_text(SAID[version])
    assert driver.find_version(tmp_path / "version") == version


@pytest.mark.parametrize(
    ("wrote", "found"),
    [("echo 572.16; echo 572.16", "572.16"), ("echo failed; exit 9", None)],
)
def test_where_no_module_says_it_nvidia_smi_does(wrote, found, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{wrote}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert driver.find_version(tmp_path / "none") == found


@pytest.mark.parametrize(
    ("version", "build"),
    [("580.65.06", "cu130"), ("579.99", "cu126"), ("470.82", "cpu")],
)
def test_the_newest_build_that_a_driver_runs_is_chosen(version, build):
    assert driver.fitting_build(version) == build


@pytest.mark.parametrize(
    ("torch", "cuda", "found", "said"),
    [
        (
            "2.13.0+cu130",
            "13.0",
            None,
            "there is no NVIDIA driver, and torch 2.13.0+cu130 needs 580 or newer",
        ),
        ("2.13.0+cpu", None, "580.65.06", "is built without CUDA: make env TORCH=cu130"),
        (
            "2.13.0+cu130",
            "13.0",
            "550.54",
            (
                "the NVIDIA driver is 550.54, and torch 2.13.0+cu130 needs 580 or newer: "
                "make env TORCH=cu126"
            ),
        ),
    ],
)
def test_why_there_is_no_gpu_is_said_with_the_command_that_mends_it(torch, cuda, found, said):
    assert said in driver.why_no_gpu(torch, cuda, found)
