package discovery

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// startUnready runs a server that is not ready at first.
func startUnready(t *testing.T, cfg Config) running {
	t.Helper()
	cfg.GRPCAddr = "127.0.0.1:0"
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return run(t, s)
}

// hostsOf returns the hosts and addresses that the client has received, as text.
func hostsOf(t *testing.T, c client) string {
	t.Helper()
	return fmt.Sprint(ipsOf(t, merged(t, c.state())))
}

// D43: without any object the server is not ready and serves no stream, so that no client
// drops its hosts. It is ready with the first object.
func TestEmptyAtStart(t *testing.T) {
	t.Parallel()
	for name, content := range map[string]string{"empty": "", "broken": svc("web", "clusterIP: x"), "other kinds": "kind: ConfigMap\nmetadata: {name: a}\n"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if content != "" {
				write(t, dir, "a.yaml", content)
			}
			r := startUnready(t, Config{ConfigDir: dir})
			wait.Until(t, "it says why it waits", func() bool { return strings.Contains(r.Waiting(), "--allow-empty") })
			for _, variant := range []string{variantSotw, variantDelta} {
				err := open(t, variant, r, node(t, "shop")).err()
				if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "--allow-empty") {
					t.Errorf("%s: got %v, want Unavailable with the reason", variant, err)
				}
			}
			select {
			case <-r.Ready():
				t.Fatal("ready without an object")
			default:
			}
			write(t, dir, "b.yaml", svc("cart", "clusterIP: 10.0.0.1"))
			<-r.Ready()
			if why := r.Waiting(); why != "" {
				t.Errorf("ready, and still waiting: %s", why)
			}
			c := openDelta(t, r, node(t, "shop"), nil)
			c.next()
			if got := hostsOf(t, c); got != "map[cart.shop.svc.cluster.local:10.0.0.1]" {
				t.Errorf("got %s", got)
			}
		})
	}
}

// C7, D43: when the directory becomes empty, the last good objects stay in use; that is
// logged and counted. An object that comes back is used at once.
func TestDirectoryBecomesEmpty(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	write(t, dir, "b.yaml", svc("cart", "clusterIP: 10.0.0.2"))
	logs := &testlog.Buffer{}
	r := start(t, Config{ConfigDir: dir, Logger: logs.Logger()})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	before := hostsOf(t, c)
	// In one step, as when a file system is mounted.
	swap(t, dir)
	wait.Until(t, "an error, and two objects that are kept", func() bool {
		errs := r.Errors()
		return len(errs) == 1 && errs[0].Kept && strings.Contains(errs[0].Error(), "--allow-empty") &&
			testutil.ToFloat64(r.metrics.kept) == 2
	})
	if n := logs.Count("holds no object any more"); n != 1 {
		t.Errorf("%d lines about it, want 1", n)
	}
	c.quiet()
	if got := hostsOf(t, c); got != before {
		t.Errorf("got %s, want %s", got, before)
	}
	write(t, dir, "b.yaml", svc("cart", "clusterIP: 10.0.0.3"))
	c.next()
	if got := hostsOf(t, c); !strings.Contains(got, "10.0.0.3") || len(r.Errors()) != 0 {
		t.Errorf("got %s, %v", got, r.Errors())
	}
	// An object that does not come back is removed after the directory has settled.
	c.next()
	if got := hostsOf(t, c); got != "map[cart.shop.svc.cluster.local:10.0.0.3]" {
		t.Errorf("got %s", got)
	}
	if n := testutil.ToFloat64(r.metrics.kept); n != 0 {
		t.Errorf("%v objects kept, want 0", n)
	}
}

// With AllowEmpty, the last host is removed with the last file.
func TestAllowEmpty(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir, AllowEmpty: true})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	if n := len(c.next().tables[""].GetTable()); n != 0 {
		t.Errorf("%d hosts, want none", n)
	}
}

// D43: the objects of a subdirectory that is empty stay in use, whether its file system was
// unmounted or its last file was removed. The objects of a removed subdirectory do not.
func TestSubdirectoryIsReplaced(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	sub := filepath.Join(dir, "team")
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	write(t, sub, "b.yaml", svc("cart", "clusterIP: 10.0.0.2"))
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	swap(t, sub)
	wait.Until(t, "an error", func() bool {
		errs := r.Errors()
		return len(errs) == 1 && errs[0].File == "team" && errs[0].Kept
	})
	c.quiet()
	write(t, sub, "c.yaml", svc("basket", "clusterIP: 10.0.0.4"))
	for strings.Contains(hostsOf(t, c), "cart") {
		c.next()
	}
	if err := os.Remove(filepath.Join(sub, "c.yaml")); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "an error", func() bool {
		errs := r.Errors()
		return len(errs) == 1 && errs[0].Kept && strings.HasPrefix(errs[0].Error(), "team: is empty: ")
	})
	c.quiet()
	if err := os.Remove(sub); err != nil {
		t.Fatal(err)
	}
	for strings.Contains(hostsOf(t, c), "basket") {
		c.next()
	}
	if errs := r.Errors(); len(errs) != 0 {
		t.Errorf("a removed directory is an error: %v", errs)
	}
}

// D18: after a restart the last good objects are in use if they are broken, or if the
// directory is empty or missing. An object that was removed meanwhile is not.
func TestLastGoodOverRestart(t *testing.T) {
	t.Parallel()
	const both = "map[cart.shop.svc.cluster.local:10.0.0.2 web.shop.svc.cluster.local:10.0.0.1]"
	put := func(content string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			t.Helper()
			write(t, dir, "sub/b.yaml", content)
		}
	}
	for name, test := range map[string]struct {
		change func(t *testing.T, dir string)
		want   string
		errs   int
	}{
		"broken document":    {put(svc("cart", "clusterIP: x")), both, 1},
		"no YAML":            {put("\tnot: [yaml\n"), both, 1},
		"empty file":         {put(""), both, 1},
		"empty subdirectory": {func(t *testing.T, dir string) { t.Helper(); swap(t, filepath.Join(dir, "sub")) }, both, 1},
		"empty directory":    {swap, both, 1},
		"no directory": {func(t *testing.T, dir string) {
			t.Helper()
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
		}, both, 1},
		"removed file": {func(t *testing.T, dir string) {
			t.Helper()
			if err := os.RemoveAll(filepath.Join(dir, "sub")); err != nil {
				t.Fatal(err)
			}
		}, "map[web.shop.svc.cluster.local:10.0.0.1]", 0},
	} {
		t.Run(name, func(t *testing.T) {
			dir, state := filepath.Join(t.TempDir(), "config"), t.TempDir()
			write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
			write(t, dir, "sub/b.yaml", svc("cart", "clusterIP: 10.0.0.9"))
			r := start(t, Config{ConfigDir: dir, StateDir: state})
			c := openDelta(t, r, node(t, "shop"), nil)
			c.next()
			// The file of last good objects is older than this edit until the process
			// ends.
			write(t, dir, "sub/b.yaml", "# a comment first\n---\n"+svc("cart", "clusterIP: 10.0.0.2"))
			c.next()
			r.stop()
			test.change(t, dir)
			// Twice: the first restart must not lose the saved objects.
			for range 2 {
				r = start(t, Config{ConfigDir: dir, StateDir: state})
				c = openDelta(t, r, node(t, "shop"), nil)
				c.next()
				if got := hostsOf(t, c); test.want != both && got == both {
					c.next() // it is gone once that has settled
				}
				if got := hostsOf(t, c); got != test.want {
					t.Errorf("got %s, want %s", got, test.want)
				}
				if errs := r.Errors(); len(errs) != test.errs || test.errs > 0 && !errs[0].Kept {
					t.Errorf("errors %v, want %d that are kept", errs, test.errs)
				}
				r.stop()
			}
		})
	}
}

// A damaged file of last good objects is set aside and logged. The objects in the
// directory are used.
func TestDamagedObjectsFile(t *testing.T) {
	t.Parallel()
	dir, state := t.TempDir(), t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	start(t, Config{ConfigDir: dir, StateDir: state}).stop()
	path := filepath.Join(state, "objects.json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(data), `"web"`, `"wob"`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	logs := &testlog.Buffer{}
	start(t, Config{ConfigDir: dir, StateDir: state, Logger: logs.Logger()}).stop()
	if n := logs.Count("the file of last good objects is damaged and was moved"); n != 1 {
		t.Errorf("%d lines about it, want 1:\n%s", n, logs)
	}
	if _, err := os.Stat(path + ".damaged"); err != nil {
		t.Error(err)
	}
	if again, err := os.ReadFile(path); err != nil || string(again) != string(data) {
		t.Errorf("written again: %s, %v", again, err)
	}
}

// While the file of an object is broken, a copy of the object in another file does not
// replace it.
func TestDuplicateDoesNotTakeOver(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	write(t, dir, "b.yaml", svc("web", "clusterIP: 10.0.0.2"))
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	write(t, dir, "a.yaml", svc("web", "clusterIP: x"))
	wait.Until(t, "the error", func() bool {
		errs := r.Errors()
		return len(errs) > 0 && errs[0].Kept
	})
	c.quiet()
	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	c.next()
	if got := hostsOf(t, c); got != "map[web.shop.svc.cluster.local:10.0.0.2]" {
		t.Errorf("got %s", got)
	}
}

// A link on the path of the directory that is pointed elsewhere, such as "current ->
// releases/2", is noticed at once.
func TestLinkToDirectoryIsChanged(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	link := filepath.Join(top, "current")
	turn := func(to string) {
		t.Helper()
		if err := os.Symlink(to, link+".new"); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(link+".new", link); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3 {
		write(t, filepath.Join(top, "releases", strconv.Itoa(i), "config"), "a.yaml", svc("web", fmt.Sprintf("clusterIP: 10.0.0.%d", i)))
	}
	turn("releases/0")
	r := start(t, Config{ConfigDir: filepath.Join(link, "config")})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	for i := 1; i < 3; i++ {
		turn(fmt.Sprintf("releases/%d", i))
		c.next()
		if got, want := hostsOf(t, c), fmt.Sprintf("map[web.shop.svc.cluster.local:10.0.0.%d]", i); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// A write to the target of a linked file is noticed.
func TestLinkedFileIsWritten(t *testing.T) {
	t.Parallel()
	dir, elsewhere := t.TempDir(), t.TempDir()
	write(t, elsewhere, "web.yaml", svc("web", "clusterIP: 10.0.0.1"))
	if err := os.Symlink(filepath.Join(elsewhere, "web.yaml"), filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	write(t, elsewhere, "web.yaml", svc("web", "clusterIP: 10.0.0.2"))
	c.next()
	// A missing target does not remove the object.
	if err := os.Rename(elsewhere, elsewhere+".away"); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "b.yaml", svc("cart", "clusterIP: 10.0.0.3"))
	c.next()
	if got := hostsOf(t, c); got != "map[cart.shop.svc.cluster.local:10.0.0.3 web.shop.svc.cluster.local:10.0.0.2]" {
		t.Errorf("got %s", got)
	}
}

// swap replaces dir by an empty directory in one step, as a mount does.
func swap(t *testing.T, dir string) {
	t.Helper()
	empty := t.TempDir()
	if err := unix.Renameat2(unix.AT_FDCWD, empty, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE); err != nil {
		t.Fatal(err)
	}
}
