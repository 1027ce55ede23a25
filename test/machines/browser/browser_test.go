package browser

import (
	"context"
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/nametap/nametap/internal/fleetpage"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

var pictures = flag.String("browser.pictures", "", "write pictures of the page to this directory")

func TestMain(m *testing.M) { os.Exit(lab.Main(m, "chromium")) }

// A tab is a tab of a browser that shows a page.
type tab struct {
	*testing.T
	ctx  context.Context
	base string

	mu       sync.Mutex
	requests []string // URLs that were requested
	errors   []string // of scripts, and of what the page's policy forbids
}

// open opens a page of a server in a window of a width, in the light or the dark.
func open(t *testing.T, page string, width int64, scheme string) *tab {
	t.Helper()
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath("chromium"), chromedp.NoSandbox, chromedp.Flag("lang", "en"))
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(cancel)
	b := &tab{T: t, base: page[:strings.LastIndex(page, "/")]}
	b.ctx, cancel = chromedp.NewContext(ctx, chromedp.WithListener(b.note))
	t.Cleanup(cancel)
	b.do(
		call(network.Enable, network.EnableParams{}), call(log.Enable, cdp.Empty{}),
		chromedp.EmulateViewport(width, 700),
		call(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}}),
		call(emulation.SetTimezoneOverride, emulation.SetTimezoneOverrideParams{TimezoneID: "UTC"}),
		chromedp.Navigate(page), chromedp.WaitVisible(chromedp.CSS("#main h2")),
	)
	return b
}

// call returns an action that calls a command of the browser's protocol.
func call[P, R any](command cdp.Command[P, R], params P) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, command, params)
		return err
	})
}

// note notes an event of the browser.
func (b *tab) note(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		b.requests = append(b.requests, e.Request.URL)
	case *runtime.EventExceptionThrown:
		b.errors = append(b.errors, e.ExceptionDetails.Text)
	case *log.EventEntryAdded:
		if !strings.HasSuffix(e.Entry.URL, "/favicon.ico") {
			b.errors = append(b.errors, e.Entry.Text)
		}
	}
}

// do takes actions.
func (b *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	if err := chromedp.Do(b.ctx, actions...); err != nil {
		b.Fatal(err)
	}
}

// run takes an action, and returns its value.
func run[V any](b *tab, action chromedp.Action[V]) V {
	b.Helper()
	value, err := chromedp.Run(b.ctx, action)
	if err != nil {
		b.Fatal(err)
	}
	return value
}

// text returns the text of the first element that matches a selector, as the user sees it.
func (b *tab) text(selector string) string {
	b.Helper()
	return run(b, chromedp.Text(chromedp.CSS(selector)))
}

// eval returns the value of an expression.
func (b *tab) eval(expression string) string {
	b.Helper()
	return run(b, chromedp.Evaluate[string]("String("+expression+")"))
}

// await waits until an expression is true.
func (b *tab) await(expression string) {
	b.Helper()
	wait.Until(b, expression, func() bool { return b.eval(expression) == "true" })
}

// open opens the first row of the table.
func (b *tab) open() {
	b.Helper()
	b.do(chromedp.Click(chromedp.CSS("tbody td.name a")))
}

// want fails the test unless the heading is as given, and the rest of the page has the texts.
func (b *tab) want(heading string, texts ...string) {
	b.Helper()
	b.await("document.querySelector('#main h2').textContent === " + quoted(heading))
	page := b.text("#main")
	for _, text := range texts {
		if !strings.Contains(page, text) {
			b.Errorf("below %q, want %q in\n%s", heading, text, page)
		}
	}
}

func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", `\'`) + "'" }

// press presses keys; the element with the focus gets them.
func (b *tab) press(keys ...string) {
	b.Helper()
	for _, key := range keys {
		b.do(chromedp.KeyEvent(key))
	}
}

// reach presses Tab until the link with a text has the focus.
func (b *tab) reach(text string) {
	b.Helper()
	for range 200 {
		if b.eval("document.activeElement.textContent") == text {
			return
		}
		b.press(kb.Tab)
	}
	b.Fatalf("Tab does not reach %q", text)
}

// picture writes a picture of the window, if the pictures are wanted.
func (b *tab) picture(name string) {
	b.Helper()
	if *pictures == "" {
		return
	}
	if err := os.WriteFile(filepath.Join(*pictures, name+".png"), run(b, chromedp.CaptureScreenshot()), 0o600); err != nil {
		b.Fatal(err)
	}
}

// end fails the test if a script has failed, or something was requested from elsewhere.
func (b *tab) end() {
	b.Helper()
	if title := b.eval("document.title"); title != "nametap fleet" {
		b.Errorf("a text was read as HTML: the title is %q", title)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, text := range b.errors {
		b.Errorf("the browser reports: %s", text)
	}
	for _, url := range b.requests {
		if !strings.HasPrefix(url, b.base+"/") {
			b.Errorf("the page requests %s", url)
		}
	}
}

// serve serves the page that `kubectl nametap fleet --output html` prints.
func serve(t *testing.T, agents []byte) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write(fleetpage.With(agents, time.Date(2026, 1, 5, 10, 12, 0, 0, time.UTC)))
	}))
	t.Cleanup(server.Close)
	return server.URL + "/"
}

// escaped returns the fleet with the characters that the plugin escapes.
func escaped() []byte { return []byte(strings.ReplaceAll(string(fleet()), "<", `\u003c`)) }

const verdict = "104 agents: 15 have a problem, 1 cannot be asked, 5 have warnings"

// TestFleet goes from the namespaces to the problems of a pod with the mouse.
func TestFleet(t *testing.T) { // R25
	b := open(t, serve(t, escaped()), 1100, "light")
	b.want(verdict,
		"10.96.0.53, the nameserver of corp.example, refuses queries nameserver_refuses\n11 agents: payments 11 of 17",
		"no reply in 5s no_reply\n1 agent: edge 1 of 12")
	if first := b.text("tbody tr"); !strings.Contains(first, "payments") || !strings.Contains(first, "11 problem, 6 ok") {
		t.Errorf("the first namespace is %q, want the one with most problems", first)
	}
	b.picture("namespaces")
	b.open()
	b.want("payments: 17 agents", "gateway-0", "mail-2")
	b.picture("pods")
	b.open()
	b.want("gateway-0", hostile, "1,204 hosts", "kubectl nametap doctor gateway-0 -n payments")
	b.picture("pod")
	b.end()
}

// TestKeyboard goes the same way with the keyboard only.
func TestKeyboard(t *testing.T) { // R25
	b := open(t, serve(t, escaped()), 1100, "dark")
	b.want(verdict)
	b.picture("dark")
	if back := b.eval("getComputedStyle(document.body).backgroundColor"); back != "rgb(20, 23, 27)" {
		t.Errorf("in the dark, the page is %s", back)
	}
	b.reach("batch")
	b.press(kb.Enter)
	b.want("batch: 9 agents")
	if b.eval("document.activeElement.tagName") != "H2" {
		t.Error("a new view does not have the focus")
	}
	b.reach("report-3")
	b.press(kb.Enter)
	b.want("report-3", "the token has expired")
	b.press(kb.Escape)
	b.want("batch: 9 agents")
	b.press(kb.Escape)
	b.want(verdict)
	b.press("/", "m", "l")
	b.await("document.querySelectorAll('tbody tr').length === 1")
	b.want(verdict, "10.96.0.11, the second nameserver")
	b.press(kb.Escape)
	b.await("document.querySelectorAll('tbody tr').length === 7")
	b.reach("Failed")
	b.press(kb.Enter)
	if first, sorted := b.text("tbody tr"), b.eval("document.querySelector('th[aria-sort]').textContent"); !strings.Contains(first, "payments") || sorted != "Failed ↓" {
		t.Errorf("sorted by %q, the first is %q", sorted, first)
	}
	b.end()
}

// TestNarrow checks that a telephone needs not scroll sideways.
func TestNarrow(t *testing.T) { // R25
	b := open(t, serve(t, escaped()), 400, "light")
	b.picture("narrow")
	for _, view := range []string{"#/", "#/ns/payments", "#/pod/payments/ledger-0", "#/pod/shop/web-1", "#/pods"} {
		b.eval("location.hash = " + quoted(view))
		b.await("document.activeElement.tagName === 'H2'")
		if wide := b.eval("document.documentElement.scrollWidth"); wide != "400" {
			t.Errorf("%s is %s pixels wide", view, wide)
		}
	}
	b.end()
}

// TestLive shows the agents of a nametap-discovery that runs: one that connects, and is gone later.
func TestLive(t *testing.T) { // R25
	const grpc, status = "127.0.0.1:25010", "127.0.0.1:25014"
	start := func(name string, args ...string) *exec.Cmd {
		cmd := exec.Command(lab.Program(t, name), args...)
		cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		end := sync.OnceFunc(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		t.Cleanup(end)
		return cmd
	}
	dir := t.TempDir()
	object := "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.0.0.1}\n"
	if err := os.WriteFile(filepath.Join(dir, "web.yaml"), []byte(object), 0o600); err != nil {
		t.Fatal(err)
	}
	start("nametap-discovery", "--config-dir", dir, "--grpc-addr", grpc, "--http-addr", status)
	agent := start("nametap", "agent", "--dns-addr", "127.0.0.1:0", "--status-addr", "127.0.0.1:0", "--state-dir", "", "--xds-addr", grpc, "--xds-plaintext", "--pod-name", "web-0", "--namespace", "shop")
	for {
		response, err := http.Get("http://" + status + "/healthz/ready")
		if err == nil {
			_ = response.Body.Close()
			break
		}
	}
	b := open(t, "http://"+status+"/fleet", 900, "light")
	b.want("1 agent: ok", "shop")
	b.picture("live")
	b.open()
	b.want("shop: 1 agent", "web-0")
	b.open()
	b.want("web-0", "1 hosts", "namespace shop, IPv4", "kubectl nametap tail web-0 -n shop --failed --since 10m")
	_ = agent.Process.Kill()
	b.want("web-0 is not here")
	b.end()
}
