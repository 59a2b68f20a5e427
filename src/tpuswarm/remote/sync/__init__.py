"""Make a folder of many hosts equal to one of this computer, without a program installed at either end.

rsync cannot replace it. It has no list of what an earlier sync sent, so it deletes either nothing or also files created
on the machine, and it cannot name the files changed there. Images of machines may lack it, and one without internet
cannot install it. macOS ships another rsync, with fewer options. For `remote/copy.py`, rsync and scp do not refuse a
file that changes during the copy.
"""
