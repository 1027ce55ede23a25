package resolved

import (
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) { wait.Main(m) }

// V5: an agent that is not root asks the helper, and gets its error.
func TestAskHelper(t *testing.T) {
	synctest.Test(t, testAskHelper) // where no limit of time passes
}

func testAskHelper(t *testing.T) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "helper")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_ = Help(t.Context(), conn, conn)
	}()
	err = askHelper(t.Context(), path, Registration{Link: 1, Server: netip.MustParseAddrPort("127.0.0.1:1")})
	if err == nil || !strings.Contains(err.Error(), "interface 1 is not nametap-dns") {
		t.Errorf("the error is %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if exists(path) {
		t.Error("there is a helper without a socket")
	}
}

// TestDue checks that a Registrar without a registration does nothing until the next check. It used to
// try again at once, for ever.
func TestDue(t *testing.T) { // V5
	r := New(Config{
		Returned: func([]string) {}, Interval: time.Hour, Logger: slog.New(slog.DiscardHandler),
		Dir: filepath.Join(t.TempDir(), "absent"),
	})
	r.Set(true)
	if status, err := r.sync(t.Context()); err != nil || status.State != Absent {
		t.Fatalf("%+v, %v", status, err)
	}
	for _, ago := range []time.Duration{0, time.Minute} { // names were read for a registration that is gone
		if ago > 0 {
			r.read = time.Now().Add(-ago)
		}
		if due := r.due(); due != time.Hour {
			t.Errorf("the next check is due in %v, want the interval", due)
		}
	}
}

// TestFirstNames checks that the names of the first table are read at once, and later ones after the pause.
func TestFirstNames(t *testing.T) { // V5
	reads := 0
	r := New(Config{
		Names: func() Names {
			reads++
			return Names{Required: []string{"cluster.local"}, Fingerprint: uint64(reads - 1)} // 0: no table yet
		},
		Returned: func([]string) {}, Interval: time.Minute, Logger: slog.New(slog.DiscardHandler), Pause: time.Hour,
	})
	for i, want := range []int{1, 2, 2} {
		r.Note()
		r.readNames()
		if reads != want {
			t.Errorf("after change %d: %d reads, want %d", i, reads, want)
		}
	}
}
