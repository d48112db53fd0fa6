"""Other people's programs on top of Anabranch: a module a program, which stands on the public names alone.

    from anabranch.hosts.huey import AnabranchHuey

    huey = AnabranchHuey("app", directory="data")

Each needs its program, which an extra of the module's name installs, and no module needs another. docs/hosts.md says
what each promises. Where a message is leased, an acknowledged one survives `kill -9` of whoever works on it.
"""
