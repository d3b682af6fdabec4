// Opens pages in Chromium and says what it saw: node browser.js < jobs.json, one line of JSON a job.
// A job: {url, width, scheme, picture, append: [file, lines]}; `append` is done when the page is open, which has to show it.
const fs = require("fs");
const { chromium } = require("playwright-core");
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

async function useKeyboard(page) {
  const plot = page.locator(".plot").first();
  await plot.focus();
  await page.keyboard.press("ArrowLeft");
  await page.keyboard.press("ArrowLeft");
  const said = await page.locator("#said").textContent();
  await page.keyboard.press("+");
  const zoomed = await page.locator("#reset").isEnabled();
  await page.keyboard.press("0");
  return { said, zoomed, whole: await page.locator("#reset").isDisabled() };
}

async function dragAndReset(page) {
  const box = await page.locator(".plot .u-over").first().boundingBox();
  await page.mouse.move(box.x + box.width * 0.3, box.y + 20);
  await page.mouse.down();
  await page.mouse.move(box.x + box.width * 0.6, box.y + 20, { steps: 4 });
  await page.mouse.up();
  const zoomed = await page.locator("#reset").isEnabled();
  await page.locator("#reset").click();
  return zoomed && (await page.locator("#reset").isDisabled());
}

async function useControls(page) {
  for (const axis of ["tokens", "hours", "step"]) await page.selectOption("#axis", axis);
  await page.locator("#log").check();
  await page.locator("#smooth").fill("0.8");
  await page.locator("details summary").first().click();
  for (let press = 0; press < 3; press++) await page.locator("#theme").click();
  await page.locator("#log").uncheck();
  await page.locator("#smooth").fill("0");
}

async function look(browser, job) {
  const page = await browser.newPage({ viewport: { width: job.width, height: 900 }, colorScheme: job.scheme });
  const console_ = [];
  page.on("console", (message) => console_.push(message.text()));
  page.on("pageerror", (error) => console_.push(String(error)));
  page.on("request", (asked) => {
    if (!job.append && !/^(file|data):/.test(asked.url())) console_.push(`asked ${asked.url()}`);
  });
  const begun = Date.now();
  await page.goto(job.url);
  await page.waitForSelector("body[data-drawn]");
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  const seen = { seconds: (Date.now() - begun) / 1000, charts: await page.locator("figure canvas").count() };
  if (job.picture) await page.screenshot({ path: job.picture, fullPage: true });
  if (job.append) {
    fs.appendFileSync(...job.append);
    const appended = Date.now();
    await page.getByText(job.expect).first().waitFor({ timeout: 20000 });
    seen.shown_after = (Date.now() - appended) / 1000;
  }
  seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  seen.title = await page.title();
  await page.evaluate(axe);
  const found = await page.evaluate(() => axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] }));
  seen.violations = found.violations.map(({ id, nodes }) => `${id}: ${nodes[0].html.slice(0, 200)}`);
  seen.keyboard = await useKeyboard(page);
  seen.dragged = await dragAndReset(page);
  await useControls(page);
  await page.close();
  return { ...seen, console: console_ };
}

(async () => {
  const browser = await chromium.launch({ executablePath: process.argv[2], args: ["--no-sandbox"] });
  for (const job of JSON.parse(fs.readFileSync(0, "utf8"))) console.log(JSON.stringify(await look(browser, job)));
  await browser.close();
})();
