//nolint:forbidigo // the tests of this file run in synctest bubbles, whose clock Sleep advances
package resolvconf_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/dnsproxy/resolvconf"
)

// write writes a file in place, as echo does.
func write(tb testing.TB, path, text string) {
	tb.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		tb.Fatal(err)
	}
}

// replace renames a file or symlink, which create creates, over path.
func replace(t *testing.T, path string, create func(path string) error) {
	t.Helper()
	if err := create(path + ".new"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// file returns a function that creates a file with this text.
func file(text string) func(string) error {
	return func(path string) error { return os.WriteFile(path, []byte(text), 0o644) }
}

// link returns a function that creates a symlink to target.
func link(target string) func(string) error {
	return func(path string) error { return os.Symlink(target, path) }
}

// An event is a call of Changed, with the first server if there is one, or of Failed.
type event struct {
	server string
	err    error
}

// watch runs a watcher until the test ends.
func watch(t *testing.T, files resolvconf.Files) <-chan event {
	t.Helper()
	current, err := files.Read()
	if (current == nil) != (err != nil) {
		t.Fatalf("%v, %v", current, err)
	}
	events := make(chan event, 100)
	w := resolvconf.Watcher{
		Files:   files,
		Current: current,
		Changed: func(c *resolvconf.Config) {
			var e event
			if len(c.Servers) > 0 {
				e.server = c.Servers[0].Addr().String()
			}
			events <- e
		},
		Failed: func(err error) { events <- event{err: err} },
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if len(events) > 0 {
			t.Errorf("%d events too many, the first %+v", len(events), <-events)
		}
	})
	return events
}

// next returns the next event, which must occur within 1 s of the synctest bubble's time, which
// advances only while all goroutines wait.
func next(t *testing.T, events <-chan event) event {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(time.Second):
		t.Fatal("no event within 1 s")
		return event{}
	}
}

// wantServer waits for the change to a configuration with this first server.
func wantServer(t *testing.T, events <-chan event, server string) {
	t.Helper()
	if e := next(t, events); e.server != server {
		t.Fatalf("got %+v, want the server %s", e, server)
	}
}

// wantError waits for an error that contains text.
func wantError(t *testing.T, events <-chan event, text string) {
	t.Helper()
	if e := next(t, events); e.err == nil || !strings.Contains(e.err.Error(), text) {
		t.Fatalf("got %+v, want an error with %q", e, text)
	}
}

// F5, V6: a file is written in place, replaced, removed and created again.
func TestWatchFile(t *testing.T) { synctest.Test(t, testWatchFile) }

func testWatchFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	write(t, path, "nameserver 10.0.0.1\n")
	events := watch(t, resolvconf.Files{Path: path})

	write(t, path, "nameserver 10.0.0.2\n")
	wantServer(t, events, "10.0.0.2")
	replace(t, path, file("nameserver 10.0.0.3\n"))
	wantServer(t, events, "10.0.0.3")
	replace(t, path, file("# another comment\nnameserver 10.0.0.3\n")) // no change
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	wantError(t, events, "no such file")
	time.Sleep(10 * time.Second)            // the error is reported once
	write(t, path, "nameserver 10.0.0.3\n") // the same configuration
	time.Sleep(time.Second)
	write(t, path, "nameserver 10.0.0.4\n")
	wantServer(t, events, "10.0.0.4")
}

// F5: a file that is absent at the start, which the caller has reported, is used when it
// appears. That it disappears is reported.
func TestWatchAbsentFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "resolv.conf")
		events := watch(t, resolvconf.Files{Path: path})
		<-time.After(10 * time.Second)
		write(t, path, "nameserver 10.0.0.1\n")
		wantServer(t, events, "10.0.0.1")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		wantError(t, events, "no such file")
	})
}

// F5: an unusable file is reported, and the configuration in use stays.
func TestWatchBroken(t *testing.T) { synctest.Test(t, testWatchBroken) }

func testWatchBroken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	write(t, path, "nameserver 10.0.0.1\n")
	events := watch(t, resolvconf.Files{Path: path})

	write(t, path, "")
	wantError(t, events, "names none")
	write(t, path, "nameserver 10.0.0.")
	write(t, path, strings.Repeat("#", 100_000))
	wantError(t, events, "longer than 65536 bytes")
	replace(t, path, func(path string) error { return syscall.Mkfifo(path, 0o644) })
	wantError(t, events, "not a regular file")
	replace(t, path, file("nameserver 10.0.0.1\nnameserver 10.0.0.2\n"))
	wantServer(t, events, "10.0.0.1")
	// A file that is only half written is not used.
	for offset := range 20 {
		time.Sleep(time.Duration(offset) * 37 * time.Millisecond)
		write(t, path, "")
		time.Sleep(40 * time.Millisecond)
		write(t, path, "nameserver 10.0.0.1")
		time.Sleep(40 * time.Millisecond)
		server := "10.0.0.1" + string(rune('0'+offset%10))
		write(t, path, "nameserver "+server+"\n")
		wantServer(t, events, server)
	}
}

// F5: a file that never named a nameserver is followed for its search list.
func TestWatchWithoutNameservers(t *testing.T) { synctest.Test(t, testWatchWithoutNameservers) }

func testWatchWithoutNameservers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	write(t, path, "search a.example\n")
	events := watch(t, resolvconf.Files{Path: path})

	synctest.Wait()
	time.Sleep(2 * time.Second)
	if len(events) > 0 {
		t.Fatalf("got %+v from a file that did not change", <-events)
	}
	write(t, path, "search b.example\n")
	if e := next(t, events); e.err != nil {
		t.Fatalf("got %+v, want the change of the search list", e)
	}
	write(t, path, "nameserver 10.0.0.1\n")
	wantServer(t, events, "10.0.0.1")
	write(t, path, "search b.example\n")
	wantError(t, events, "names none")
}

// F5, V6: Kubernetes replaces a symlink to a directory.
func TestWatchSymlinks(t *testing.T) { synctest.Test(t, testWatchSymlinks) }

func testWatchSymlinks(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for i, name := range []string{"one", "two", "run"} {
		if err := os.Mkdir(at(name), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, at(name+"/resolv.conf"), "nameserver 10.0.0."+string(rune('1'+i))+"\n")
	}
	for _, l := range [][2]string{{"one", "..data"}, {"..data/resolv.conf", "resolv.conf"}} {
		if err := os.Symlink(l[0], at(l[1])); err != nil {
			t.Fatal(err)
		}
	}
	events := watch(t, resolvconf.Files{Path: at("resolv.conf")})

	replace(t, at("..data"), link("two"))
	wantServer(t, events, "10.0.0.2")
	replace(t, at("resolv.conf"), link("run/resolv.conf"))
	wantServer(t, events, "10.0.0.3")
	replace(t, at("run/resolv.conf"), file("nameserver 10.0.0.4\n"))
	wantServer(t, events, "10.0.0.4")
}

// F6: the servers of systemd-resolved replace its stub.
func TestReadStub(t *testing.T) {
	dir := t.TempDir()
	files := resolvconf.Files{Path: filepath.Join(dir, "stub"), Uplink: filepath.Join(dir, "uplink")}
	write(t, files.Path, "nameserver 10.0.0.1\nnameserver 127.0.0.53\nnameserver 127.0.0.54\nnameserver 10.0.0.2\n"+
		"options edns0 trust-ad\nsearch lan\n")
	read := func() *resolvconf.Config {
		t.Helper()
		conf, err := files.Read()
		if err != nil {
			t.Fatal(err)
		}
		return conf
	}
	want := &resolvconf.Config{
		Servers: servers("10.0.0.1", "127.0.0.53", "127.0.0.54", "10.0.0.2"),
		Search:  []string{"lan"}, TrustAD: true,
	}
	for _, text := range []string{"", "nameserver 127.0.0.53\n"} {
		if text != "" {
			write(t, files.Uplink, text)
		}
		got := read()
		if len(got.Ignored) != 1 || !strings.Contains(got.Ignored[0], "stub 127.0.0.53") {
			t.Errorf("uplink %q: ignored %q, want a sentence on the stub", text, got.Ignored)
		}
		got.Ignored = nil
		if d := diff(want, got); d != "" {
			t.Errorf("uplink %q: -want +got\n%s", text, d)
		}
	}
	write(t, files.Uplink, "nameserver 192.0.2.1\nnameserver 10.0.0.2\nsearch other\n")
	want.Servers, want.TrustAD, want.Uplink = servers("10.0.0.1", "192.0.2.1", "10.0.0.2"), false, files.Uplink
	if d := diff(want, read()); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
}

// F5, F6: changes of systemd-resolved's servers are noticed.
func TestWatchStub(t *testing.T) { synctest.Test(t, testWatchStub) }

func testWatchStub(t *testing.T) {
	dir := t.TempDir()
	files := resolvconf.Files{Path: filepath.Join(dir, "stub"), Uplink: filepath.Join(dir, "uplink")}
	write(t, files.Path, "nameserver 127.0.0.53\n")
	events := watch(t, files)

	write(t, files.Uplink, "nameserver 10.0.0.1\n")
	wantServer(t, events, "10.0.0.1")
	replace(t, files.Uplink, file("nameserver 10.0.0.2\n"))
	wantServer(t, events, "10.0.0.2")
	if err := os.Remove(files.Uplink); err != nil { // the servers behind the stub remain in use
		t.Fatal(err)
	}
	wantError(t, events, "no such file")
	write(t, files.Path, "nameserver 10.0.0.3\n")
	wantServer(t, events, "10.0.0.3")
}

func TestReadMissing(t *testing.T) {
	_, err := resolvconf.Files{Path: filepath.Join(t.TempDir(), "no")}.Read()
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v, want the error of a missing file", err)
	}
}

// BenchmarkRead measures what a watcher does at each tick.
func BenchmarkRead(b *testing.B) {
	path := filepath.Join(b.TempDir(), "resolv.conf")
	write(b, path, "search default.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n")
	files := resolvconf.Files{Path: path}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := files.Read(); err != nil {
			b.Fatal(err)
		}
	}
}
