"""Checks whether another user could have written a file."""

import os
import stat
from pathlib import Path


class PlantedError(Exception):
    """Another user can write a file, or a folder in its path."""


def refuse_others(path: Path) -> None:
    """Refuse a file or folder that another user than root and this one could have written or replaced.

    The rules are those of ssh for its keys: the file and every folder above it must belong to this user or to
    root, and must not be writable by others. A folder with the sticky bit, such as `/tmp`, is accepted, since
    others can add files there but not replace any. A group that contains only this user may write, as many
    systems set up home folders.

    Args:
        path: An existing file or folder. Links are followed, and their folders are checked too.

    Raises:
        PlantedError: Names the first unsafe path and the reason.
        OSError: If a path cannot be read.
    """
    if not hasattr(os, "geteuid"):  # Windows has other rules
        return
    seen: set[Path] = set()
    for start in (path.absolute(), path.resolve()):
        for each in (start, *start.parents):
            if each not in seen:
                seen.add(each)
                _refuse(each, is_itself=each == start)


def _refuse(path: Path, is_itself: bool) -> None:
    status = path.lstat() if path.is_symlink() else path.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise PlantedError(f"{path} belongs to {_name(status.st_uid)}, and is not loaded")
    if stat.S_ISLNK(status.st_mode):
        return  # its mode says nothing; what it leads to is looked at
    others = bool(status.st_mode & stat.S_IWOTH)
    group = bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX) and not is_itself
    if (others or group) and not is_sticky:
        raise PlantedError(f"{path} can be written by {'everybody' if others else 'its group'}")


def _is_own_group(gid: int) -> bool:
    """Return whether a group is root's, or contains only this user."""
    if gid == 0:
        return True
    try:
        import grp  # not on Windows
        import pwd

        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except (ImportError, KeyError):
        return False
    return (
        group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )


def _name(uid: int) -> str:
    try:
        import pwd

        return f"the user {pwd.getpwuid(uid).pw_name}"
    except (ImportError, KeyError):
        return f"the user of number {uid}"
