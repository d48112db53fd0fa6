"""The ground that every part stands on: files, locks, descriptors, disks, clocks and background threads. Imports
policies alone.

    with locking.DirectoryLock(directory): ...           # one owner for a directory, gone with its process
    files.replace_file(path, data)                       # the old content or the new one, whatever crash comes
    background.shared().schedule(5.0, job)                # a job on the threads that all stores share

Nothing here knows messages or stores. `files` is durable where its functions say so; a lock ends with its process, and
what the threads of `background` do a store does by itself at its next call, or at the next open.
"""
