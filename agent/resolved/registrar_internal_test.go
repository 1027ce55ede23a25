package resolved

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

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
	if _, err := os.Stat(path); err == nil {
		t.Error("there is a helper without a socket")
	}
}
