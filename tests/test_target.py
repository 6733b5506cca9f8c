"""Targets: the shared memory of every architecture, and what is refused."""

from __future__ import annotations

import re

import pytest

from flash_cute.errors import InvalidProblem, UnsupportedProblem
from flash_cute.target import KNOWN_ARCHS, Target

KIB = 1024
# CUDA C++ Programming Guide, maximum amount of shared memory per thread block.
SMEM_BYTES = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_87": 163 * KIB,
    "sm_89": 99 * KIB,
    "sm_90a": 227 * KIB,
    "sm_100a": 227 * KIB,
    "sm_103a": 227 * KIB,
    "sm_120a": 99 * KIB,
    "sm_121a": 99 * KIB,
}


def test_every_known_arch_is_listed_here():
    assert set(KNOWN_ARCHS) == set(SMEM_BYTES)


@pytest.mark.parametrize("arch", KNOWN_ARCHS)
def test_target_has_the_memory_of_its_exact_arch(arch: str):
    target = Target.from_arch(arch)
    assert (target.arch, target.smem_bytes) == (arch, SMEM_BYTES[arch])
    assert target == Target.from_capability(*target.capability)


def test_target_of_hopper_is_the_one_of_an_h200():
    assert Target.from_arch("sm_90a") == Target("sm_90a", 132, 232448)


@pytest.mark.parametrize("name", ["sm_90a", "sm_90", "SM_90A", "sm90", "90", " 90a "], ids=repr)
def test_target_understands_the_usual_spellings(name: str):
    assert Target.from_arch(name).arch == "sm_90a"


@pytest.mark.parametrize("name", ["", "hopper", "sm_", "sm_9", "sm_9000", "compute_90", "90 a"])
def test_target_refuses_what_is_no_arch(name: str):
    with pytest.raises(InvalidProblem, match=re.escape(f"arch is {name!r}, expected one of sm_80")):
        Target.from_arch(name)


@pytest.mark.parametrize(("name", "right"), [("sm_80a", "sm_80"), ("sm_100f", "sm_100a")])
def test_target_refuses_a_suffix_it_would_drop(name: str, right: str):
    with pytest.raises(InvalidProblem, match=f"arch is '{name}', expected {right}"):
        Target.from_arch(name)


@pytest.mark.parametrize("name", ["sm_75", "sm_110a", "sm_70"])
def test_target_refuses_an_arch_it_does_not_know(name: str):
    with pytest.raises(UnsupportedProblem, match=r"compute capability \d+\.\d is not known"):
        Target.from_arch(name)


def test_target_takes_the_sm_count_of_the_device():
    assert Target.from_capability(9, 0, 114).num_sms == 114  # H100 PCIe
    with pytest.raises(InvalidProblem, match="num_sms is 0, expected at least 1"):
        Target.from_capability(9, 0, 0)


def test_target_is_frozen():
    with pytest.raises(AttributeError):
        Target.from_arch("sm_80").num_sms = 1  # type: ignore[misc]
