"""The program of docs/hosts.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scrapy import Request, Spider
from scrapy.core.scheduler import Scheduler
from scrapy.utils.test import get_crawler

from ...pages import of_host


def test_the_requests_of_a_job_lie_in_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"SCHEDULER_PRIORITY_QUEUE": "scrapy.pqueues.ScrapyPriorityQueue"}
    exec(of_host("scrapy"), {}, settings)
    crawler = get_crawler(Spider, settings)
    crawler.spider = crawler._create_spider("shop")
    scheduler = Scheduler.from_crawler(crawler)
    scheduler.open(crawler.spider)
    assert scheduler.enqueue_request(Request("http://shop/1"))
    scheduler.close("finished")
    assert Path("crawls/shop/anabranch").is_dir()
    scheduler.open(crawler.spider)
    request = scheduler.next_request()
    assert request is not None and request.url == "http://shop/1"
    scheduler.close("finished")
