"""Tests of the core, mostly over the smallest backend, that of the third party: it is put on the path here."""

from ..thirdparty import disk as disk
