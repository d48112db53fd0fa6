"""Other people's programs on top of Anabranch: a module a program, which stands on the public names alone.

    from anabranch.hosts.huey import AnabranchHuey

    huey = AnabranchHuey("app", directory="data")

Each needs its program, which an extra of the module's name installs, and no module needs another. docs/hosts.md says
what each promises, and what survives a crash.
"""
