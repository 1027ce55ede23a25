package discovery

import (
	"cmp"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestFileIsRemoved checks that a file that was removed is removed soon, even while a link has no target.
func TestFileIsRemoved(t *testing.T) { // D43
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "b/web.yaml", svc("web", "clusterIP: 10.0.0.1"))
	write(t, dir, "b/cart.yaml", svc("cart", "clusterIP: 10.0.0.2"))
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	if err := os.Symlink("nowhere", filepath.Join(dir, "link.yaml")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "b/cart.yaml")); err != nil {
		t.Fatal(err)
	}
	c.next()
	if got := hostsOf(t, c); got != "map[web.shop.svc.cluster.local:10.0.0.1]" {
		t.Errorf("got %s", got)
	}
}

// TestReadHangs checks that clients are served while a read of the directory hangs, as on a network file system whose
// server is away, and that it goes on afterwards.
func TestReadHangs(t *testing.T) { // D43
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	// Opening a file with a lease waits until its holder gives it up.
	write(t, dir, ".b.yaml", svc("cart", "clusterIP: 10.0.0.2"))
	file, err := os.OpenFile(filepath.Join(dir, ".b.yaml"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lease := func(cmd, arg int) int {
		t.Helper()
		got, err := unix.FcntlInt(file.Fd(), cmd, arg)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	lease(unix.F_SETLEASE, unix.F_WRLCK)
	if err := os.Rename(filepath.Join(dir, ".b.yaml"), filepath.Join(dir, "b.yaml")); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the file is being read", func() bool { return lease(unix.F_GETLEASE, 0) != unix.F_WRLCK })
	for _, variant := range []string{variantSotw, variantDelta} {
		other := open(t, variant, r, node(t, "shop"))
		other.next()
		if got := hostsOf(t, other); got != "map[web.shop.svc.cluster.local:10.0.0.1]" {
			t.Errorf("%s: got %s", variant, got)
		}
	}
	lease(unix.F_SETLEASE, unix.F_UNLCK)
	c.next()
	if got := hostsOf(t, c); got != "map[cart.shop.svc.cluster.local:10.0.0.2 web.shop.svc.cluster.local:10.0.0.1]" {
		t.Errorf("got %s", got)
	}
}

// A tree is a directory that a test edits in random ways.
type tree struct {
	t    *testing.T
	rand *rand.Rand
	dir  string
}

// files returns the paths of all files and directories below the root, sorted.
func (e *tree) files(dirs bool) []string {
	e.t.Helper()
	var all []string
	if err := filepath.WalkDir(e.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && path != e.dir && d.IsDir() == dirs && path != filepath.Join(e.dir, "stays.yaml") {
			all = append(all, path)
		}
		return err
	}); err != nil {
		e.t.Fatal(err)
	}
	return all
}

// content returns some Services, which may be broken.
func (e *tree) content() string {
	var text strings.Builder
	for range 1 + e.rand.IntN(3) {
		ip := fmt.Sprintf("10.0.%d.%d", e.rand.IntN(3), 1+e.rand.IntN(5))
		if e.rand.IntN(5) == 0 {
			ip = "broken"
		}
		text.WriteString("---\n" + svc(string(rune('a'+e.rand.IntN(8))), "clusterIP: "+ip))
	}
	if e.rand.IntN(8) == 0 {
		text.WriteString("---\n\tno: [yaml\n")
	}
	return text.String()
}

// pause waits for up to some milliseconds.
func (e *tree) pause(most int) { <-time.After(time.Duration(e.rand.IntN(most)) * time.Millisecond) }

// edit changes something.
func (e *tree) edit() {
	e.t.Helper()
	name := fmt.Sprintf("%c/%d.yaml", 'x'+rune(e.rand.IntN(3)), e.rand.IntN(3))
	files, dirs := e.files(false), e.files(true)
	switch n := e.rand.IntN(10); {
	case n < 4 || len(files) == 0 || len(dirs) == 0:
		write(e.t, e.dir, name, e.content())
	case n < 6: // in place, in two steps
		path, text := files[e.rand.IntN(len(files))], e.content()
		_ = os.WriteFile(path, []byte(text[:e.rand.IntN(len(text))]), 0o644)
		e.pause(20) // writers take time
		_ = os.WriteFile(path, []byte(text), 0o644)
	case n < 7:
		_ = os.Remove(files[e.rand.IntN(len(files))])
	case n < 8:
		_ = os.Rename(files[e.rand.IntN(len(files))], filepath.Join(e.dir, fmt.Sprintf("moved%d.yaml", e.rand.IntN(3))))
	case n < 9:
		from := dirs[e.rand.IntN(len(dirs))]
		_ = os.Rename(from, filepath.Join(e.dir, "to-"+filepath.Base(from)))
	default:
		link := filepath.Join(e.dir, fmt.Sprintf("link%d.yaml", e.rand.IntN(3)))
		_ = os.Remove(link)
		_ = os.Symlink(files[e.rand.IntN(len(files))], link)
	}
}

// repair ends what keeps objects in their last good form: what is broken, has no target, or is empty.
func (e *tree) repair() {
	e.t.Helper()
	for _, path := range e.files(false) {
		text, err := os.ReadFile(path)
		if err != nil || len(text) == 0 || strings.Contains(string(text), "broken") || strings.Contains(string(text), "no: [") {
			_ = os.Remove(path)
		}
	}
	dirs := e.files(true)
	slices.Reverse(dirs)
	for _, path := range dirs {
		_ = os.Remove(path) // fails unless it is empty
	}
}

// TestDirectoryChurn edits a directory in random ways, with what is broken, half written and moved, and checks after
// each round that the server has the table of its files, and the errors in them.
func TestDirectoryChurn(t *testing.T) { // D18, D43
	t.Parallel()
	seed := cmp.Or(*churnSeed, uint64(time.Now().UnixNano()))
	t.Logf("-churn.seed=%d", seed)
	e := &tree{t, rand.New(rand.NewPCG(seed, 1)), t.TempDir()}
	cfg := Config{ConfigDir: e.dir, StateDir: t.TempDir(), MaxClientsPerAddress: 1_000_000}
	write(t, e.dir, "stays.yaml", svc("stays", "clusterIP: 10.9.9.9"))
	r := start(t, cfg)
	for range *churnSteps / 20 {
		for range 1 + e.rand.IntN(8) {
			e.edit()
			e.pause(50) // it may be read or not
		}
		if e.rand.IntN(4) == 0 {
			r.stop()
			r = start(t, cfg)
		}
		e.repair()
		table, errs, err := Table(t.Context(), Config{ConfigDir: e.dir}, Client{Namespace: "shop"})
		if err != nil {
			t.Fatal(err)
		}
		wait.Until(t, "the server has the table of the files", func() bool {
			return bytesOf(t, merged(t, openSotw(t, r, node(t, "shop")).next().tables)) == bytesOf(t, table)
		})
		wait.Until(t, "the server has the errors of the files", func() bool { return fmt.Sprint(r.Errors()) == fmt.Sprint(errs) })
	}
}
