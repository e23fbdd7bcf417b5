"""The documented commands for a container fit the image that they build."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def container_page() -> str:
    page = (ROOT / "docs" / "installation.md").read_text()
    return page.split("## As a container")[1].split("\n## ")[0]


def image() -> str:
    return (ROOT / "packaging" / "Containerfile").read_text()


def test_mounted_directories_belong_to_the_user_of_the_image():
    # The node of the image, user 999, could not create its socket in a directory of root.
    user = re.search(r"useradd .*--uid (\d+)", image())
    assert user is not None
    mounts = re.findall(r"-v (\S+):\S+", container_page())
    assert mounts
    install = re.search(r"install -d .*", container_page())
    assert install is not None
    assert f"-o {user[1]} -g {user[1]}" in install[0]
    assert set(mounts) <= set(install[0].split())


def test_the_build_keeps_the_health_check():
    # Images in OCI's format, podman's default, have no health check.
    assert "HEALTHCHECK" in image()
    for text in (image(), container_page()):
        builds = [line for line in text.splitlines() if "podman build" in line]
        assert builds
        assert all("--format docker" in line for line in builds)


def test_a_node_with_a_persistent_pool_sees_the_processes_of_the_host():
    # It refused every client: "the node cannot see the client's process".
    run = container_page().split("podman run")[1].split("```")[0]
    assert "--pid host" in run
    assert "--ipc host" in run
