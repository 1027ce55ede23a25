package vm_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// fillConntrack fills the table of connections of the machine with ones that the kernel does not evict.
func fillConntrack(t *testing.T, m *vm.Machine) {
	t.Helper()
	limit, err := strconv.Atoi(strings.TrimSpace(m.Read("/proc/sys/net/netfilter/nf_conntrack_max")))
	if err != nil {
		t.Fatal(err)
	}
	var commands strings.Builder
	for i := range limit {
		fmt.Fprintf(&commands, "-I -p tcp -s 198.18.%d.%d -d 198.19.0.1 --sport %d --dport 443 --state ESTABLISHED -t 3600 -u ASSURED,SEEN_REPLY\n",
			i>>14, i>>6&255, 1024+i&63)
	}
	file := filepath.Join(t.TempDir(), "entries")
	if err := os.WriteFile(file, []byte(commands.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	m.Net.Exec("sh", "-c", `conntrack -R "$1" >/dev/null 2>&1 || true`, "sh", file) // the last ones find no room
}

// TestFullConntrack fills the table of connections, under load. The kernel then refuses packets of the whole host. The
// agent lives on, and DNS is back within 2 s when there is room. V9.
func TestFullConntrack(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	process := running(m)
	tr := startTraffic(t, m)
	fillConntrack(t, m)
	refused := func() int { return tr.count(load.Unsent, load.Lost, load.Failed) }
	wait.Until(t, "the kernel refuses packets", func() bool { return refused() > 4*queriesPerSecond })
	t.Logf("while the table is full, of %d queries %d were refused", tr.count(load.Kinds()...), refused())
	m.Net.Exec("conntrack", "-D", "-d", "198.19.0.1")
	began := time.Now()
	m.AwaitMesh()
	wait.Until(t, "a forwarded name has its address", func() bool { return m.Lookup(fmt.Sprintf("n%d.example.org", time.Now().UnixNano())) == vm.NamedIP })
	took := time.Since(began)
	t.Logf("DNS is back after %v", took.Round(time.Millisecond))
	if took > lapse {
		t.Errorf("DNS is back %v after there is room, want at most 2 s", took)
	}
	tr.more(time.Second) // mesh names, from the agent
	if now := running(m); now != process {
		t.Errorf("the agent was %s, now %s", process, now)
	}
	wait.Until(t, "no query fails", func() bool {
		before := tr.count(load.Unsent, load.Lost, load.Failed, load.Foreign)
		tr.more(time.Second)
		return tr.count(load.Unsent, load.Lost, load.Failed, load.Foreign) == before
	})
	tr.stop()
}
