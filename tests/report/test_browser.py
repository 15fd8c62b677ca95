"""The page in a real browser: loads from disk, answers to keys, mouse and links."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from plastiscope.report import write

spec = importlib.util.spec_from_file_location("pages", Path(__file__).with_name("test_page.py"))
pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)

selenium = pytest.importorskip("selenium", reason="selenium drives the browser")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not CHROMIUM or not DRIVER:
    pytest.skip("no chromium and chromedriver on this machine", allow_module_level=True)

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.select import Select  # noqa: E402

EVIL = "<script>document.title='pwned'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    one = pages.make_table(out / "a", run="first", name=EVIL)
    two = pages.make_table(out / "b", run=f"second {EVIL}", points=5)
    two["value"] = two["value"] + 1
    return write(pd.concat([one, two], ignore_index=True), out / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("downloads")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking"):
        options.add_argument(f"--{flag}")
    options.add_argument("--disable-dev-shm-usage")
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.downloads = folder
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, page):
    return open_page(browser, page, "#metric=effective_rank")


def open_page(browser, page, link="", size=(1280, 1000)):
    browser.set_window_size(*size)
    browser.get("about:blank")
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(page.as_uri() + link)
    wait(browser, lambda: browser.execute_script("return document.documentElement.dataset.ready"))
    return browser


def wait(browser, condition, seconds=20):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(browser.find_element(By.ID, "message").text or "timed out")


def text(browser, element):
    return browser.find_element(By.ID, element).text


def map_values(browser):
    return browser.execute_script("return document.getElementById('map').data[0].z")


def choose(browser, element, label):
    Select(browser.find_element(By.ID, element)).select_by_visible_text(label)
    time.sleep(0.6)


def test_loads_from_disk_alone_and_without_errors(opened):
    requests = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    urls = [
        one["params"]["request"]["url"]
        for one in requests
        if one["method"] == "Network.requestWillBeSent"
    ]
    assert [u for u in urls if not u.startswith(("data:", "blob:", "about:"))] == [
        opened.current_url.split("#")[0]
    ]
    assert opened.get_log("browser") == []
    assert "Losing plasticity" in opened.find_element(By.CLASS_NAME, "verdict").text


def test_names_of_the_run_do_nothing(opened):
    assert opened.title == "plastiscope report"
    choose(opened, "run", f"second {EVIL}")
    opened.find_element(By.ID, "course-details").find_element(By.TAG_NAME, "summary").click()
    assert EVIL in text(opened, "course-title")
    assert EVIL in opened.find_element(By.ID, "course-table").text
    assert opened.title == "plastiscope report"
    assert opened.find_elements(By.CSS_SELECTOR, "#course script, #map script") == []


def test_the_map_shows_the_tables_numbers(opened):
    values = map_values(opened)
    assert len(values) == 9 and len(values[0]) == 6
    assert values[4] == [39.123, 36.123, None, 30.123, 27.123, 24.123]
    choose(opened, "show", "change from the first checkpoint")
    assert map_values(opened)[4] == [0, -3, None, -9, -12, -15]
    trace = opened.execute_script("return document.getElementById('map').data[0]")
    assert [trace["zmin"], trace["zmax"]] == [-15, 15]
    assert trace["colorscale"][2] == [0.5, "#f7f7f7"]


def test_hover_says_the_value_and_its_error(opened):
    drag = opened.find_element(By.CSS_SELECTOR, "#map .nsewdrag")
    ActionChains(opened).move_to_element_with_offset(
        drag, round(drag.size["width"] / 12), 0
    ).perform()
    reading = wait(opened, lambda: text(opened, "reading"))
    assert "block 1 fc1" in reading and "± 0.25" in reading and "step 300: 30.123" in reading


def test_a_click_leads_to_the_course_of_the_component(opened):
    drag = opened.find_element(By.CSS_SELECTOR, "#map .nsewdrag")
    width, height = drag.size["width"], drag.size["height"]
    ActionChains(opened).move_to_element_with_offset(
        drag, round(width * 0.42), round(height * 0.44)
    ).click().perform()
    wait(opened, lambda: "block 2 activation" in text(opened, "course-title"))
    course = opened.execute_script("return document.getElementById('course').data.at(-1).y")
    assert course == [38.123, 35.123, 32.123, 29.123, 26.123, 23.123]
    assert "row=2%7Cactivation%7C%7C" in opened.current_url and "at=5" in opened.current_url


def test_arrow_keys_move_over_the_map(opened):
    plot = opened.find_element(By.ID, "map")
    opened.execute_script("arguments[0].focus()", plot)
    plot.send_keys(Keys.ARROW_DOWN)
    plot.send_keys(Keys.ARROW_DOWN, Keys.ARROW_LEFT)
    assert "block 0 fc1, step 400: 28.123" in text(opened, "reading")
    assert "block 0 fc1" in text(opened, "course-title")


def test_controls_answer_to_the_keyboard(opened):
    opened.find_element(By.ID, "block").send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    wait(opened, lambda: len(map_values(opened)) == 3)
    assert "block=1" in opened.current_url


def test_opens_with_what_moved_most(browser, page):
    opened = open_page(browser, page)
    assert "dormant fraction of block 0 activation" in text(opened, "course-title")
    selected = opened.execute_script("return document.getElementById('map').layout.shapes[0]")
    assert (selected["y0"], selected["y1"]) == (-0.5, 0.5)


def test_a_link_brings_the_view_back(browser, page):
    opened = open_page(browser, page)
    choose(opened, "metric", "dormant fraction")
    choose(opened, "show", "change from the first checkpoint")
    choose(opened, "block", "block 2")
    link = "#" + opened.current_url.split("#", 1)[1]
    title, values = text(opened, "map-title"), map_values(opened)
    again = open_page(browser, page, link)
    assert text(again, "map-title") == title and "dormant" in title
    assert map_values(again) == values == [[0, 0.1, 0.2, 0.3, 0.4, 0.5]]


def test_links_of_the_first_screen_lead_to_the_course(opened):
    link = opened.find_element(By.CSS_SELECTOR, "table a")
    name = link.text
    link.click()
    wait(opened, lambda: name in text(opened, "course-title"))


def test_two_runs_are_compared_at_the_same_steps(opened):
    choose(opened, "compare", f"second {EVIL}")
    differences = map_values(opened)
    assert differences[0] == [-1, -1, -1, -1, -1, None]
    assert differences[4] == [-1, -1, None, -1, -1, None]
    names = opened.execute_script(
        "return document.getElementById('course').data.filter(t => t.name).map(t => t.name)"
    )
    assert len([n for n in names if n.startswith(("first", "second"))]) == 2
    legend = opened.find_elements(By.CSS_SELECTOR, "#course .legendtext")
    assert [each.text.split(" ")[0] for each in legend] == ["first", "second"]


def test_a_gap_breaks_the_course(opened):
    opened.execute_script("location.hash = '#metric=effective_rank&row=1%7Cfc1%7C%7C'")
    wait(opened, lambda: "block 1 fc1" in text(opened, "course-title"))
    trace = opened.execute_script("return document.getElementById('course').data.at(-1)")
    assert trace["y"][2] is None and trace["connectgaps"] is False


def test_a_change_of_shape_ends_the_course(browser, tmp_path):
    table = pages.make_table(tmp_path / "t")
    table["segment"] = (table["step"] >= 300).astype("Int64")
    opened = open_page(browser, write(table, tmp_path / "r.html"), "#show=change&row=0%7Cfc1%7C%7C")
    trace = opened.execute_script("return document.getElementById('course').data.at(-1)")
    assert trace["y"] == [40.123, 37.123, 34.123, None, 31.123, 28.123, 25.123]
    assert map_values(opened)[1] == [0, -3, -6, None, None, None]


def test_the_explanation_is_in_place(opened):
    opened.find_element(By.CSS_SELECTOR, "#about summary").click()
    meaning = text(opened, "meaning")
    assert "Formula" in meaning and "When it misleads" in meaning


def test_csv_holds_the_picture(opened):
    opened.execute_script("location.hash = '#metric=effective_rank&row=1%7Cfc1%7C%7C'")
    wait(opened, lambda: "block 1 fc1" in text(opened, "course-title"))
    opened.find_element(By.ID, "course-download").click()
    file = opened.downloads / "course-effective_rank.csv"
    wait(opened, file.exists)
    table = pd.read_csv(file)
    assert table["value"].tolist()[:2] == [39.123, 36.123] and pd.isna(table["value"][2])
    assert table["status"][2] == "non_finite"
    assert table["checkpoint"][0].startswith(EVIL)


def test_copies_the_map_and_the_link(opened):
    for button in ("map-copy", "link-copy"):
        opened.find_element(By.ID, button).click()
        wait(opened, lambda button=button: text(opened, button) == "Copied")


def test_fits_a_phone(browser, page):
    opened = open_page(browser, page, "#metric=effective_rank", size=(390, 844))
    width, inner = opened.execute_script(
        "return [document.documentElement.scrollWidth, window.innerWidth]"
    )
    assert inner == 390 and width <= 390
    assert opened.find_element(By.ID, "map").size["width"] > 300
    choose(opened, "level", "single heads")
    boxes = sorted(
        opened.execute_script(
            "return [...document.querySelectorAll('#map .ytick text')].map(t => {"
            "const box = t.getBoundingClientRect(); return [box.top, box.bottom]})"
        )
    )
    assert len(boxes) > 3
    assert all(one[1] <= two[0] + 1 for one, two in pairwise(boxes))


CONTRASTS = """
const light = (c) => { const p = c.map((v) => { v /= 255;
  return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2]; };
const rgb = (text) => (text.match(/[0-9.]+/g) || []).map(Number);
const behind = (e) => { for (; e; e = e.parentElement) {
  const c = rgb(getComputedStyle(e).backgroundColor);
  if (c.length === 3 || c[3] > 0.9) return c.slice(0, 3); } return [255, 255, 255]; };
const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const [text, e] = [walk.currentNode.textContent.trim(), walk.currentNode.parentElement];
  if (!text || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(e.tagName)) continue;
  if (!e.getBoundingClientRect().width) continue;
  const drawn = e instanceof SVGElement;
  const ink = rgb(drawn ? getComputedStyle(e).fill : getComputedStyle(e).color);
  const [a, b] = [light(ink), light(behind(drawn ? e.closest(".plot") : e))];
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text]);
}
return found;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_enough_contrast(opened, theme):
    """WCAG AA asks 4.5 of every text, on whatever lies behind it."""
    choose(opened, "theme", theme)
    for details in opened.find_elements(By.CSS_SELECTOR, "details:not([open]) summary"):
        details.click()
    found = opened.execute_script(CONTRASTS)
    assert len(found) > 150
    assert [pair for pair in found if pair[0] < 4.5] == []
    least, most = min(found)[0], max(found)[0]
    assert 4.5 <= least < most <= 21


def test_the_measure_of_contrast_sees_faint_text(opened):
    """The negative control of the test above."""
    opened.execute_script("document.querySelector('h1').style.color = '#999'")
    (ratio,) = [ratio for ratio, text in opened.execute_script(CONTRASTS) if "report" in text][:1]
    assert ratio == pytest.approx(2.85, abs=0.01)


def test_another_probe_is_told_where_runs_are_compared(browser, tmp_path):
    one = pages.make_table(tmp_path / "a", run="one")
    two = pages.make_table(tmp_path / "b", run="two").assign(probe="q")
    table = pd.concat([one, two], ignore_index=True)
    opened = open_page(browser, write(table, tmp_path / "r.html"), "#run=0&compare=1")
    assert "(measured on different probes)" in text(opened, "map-title")


def test_prints_on_white_without_the_controls(opened):
    choose(opened, "theme", "dark")
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    opened.execute_script("dispatchEvent(new Event('beforeprint'))")
    try:
        body = "return getComputedStyle(document.body).backgroundColor"
        assert opened.execute_script(body) == "rgb(255, 255, 255)"
        assert not opened.find_element(By.ID, "controls").is_displayed()
        assert not opened.find_element(By.ID, "map-download").is_displayed()
        assert opened.find_element(By.CLASS_NAME, "verdict").is_displayed()
        wide = "return document.querySelector('#map .main-svg').getBoundingClientRect().width"
        assert opened.execute_script(wide) == 700
        assert opened.execute_script(wide.replace("width", "height")) <= 850
        inks = opened.execute_script(
            "return [...document.querySelectorAll('p, li, td, th, h1, h2, figcaption')]"
            ".filter(e => e.offsetParent).map(e => getComputedStyle(e).color)"
        )
        reds = [int(ink.split("(")[1].split(",")[0]) for ink in inks]
        assert len(reds) > 20 and max(reds) < 100
    finally:
        opened.execute_script("dispatchEvent(new Event('afterprint'))")
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert opened.execute_script(wide) > 1000


def test_pictures_and_controls_have_names(opened):
    for element in ("map", "course"):
        label = opened.find_element(By.ID, element).get_attribute("aria-label")
        assert "effective rank" in label
    unnamed = opened.execute_script(
        "return [...document.querySelectorAll('select')].filter(s => !s.labels.length).length"
    )
    assert unnamed == 0
