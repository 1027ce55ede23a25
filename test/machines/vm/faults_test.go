package vm

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

// testFrozen stops all processes of the machine for longer than any watchdog waits, under load, as a suspend or a debugger
// of the whole machine does. DNS is back within 2 s, from the nameserver. After the end, the agent captures again within
// 2 s, and takes pushes. V2, V7.
func testFrozen(t *testing.T, m *lab.Machine) {
	tr := startTraffic(t, m)
	var thaw func()
	tr.outage(func() { thaw = m.Freeze() })
	tr.past(12 * time.Second * 8 / 10) // of the mesh names
	m.World.Control.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		lab.Mesh:         {Ips: []string{lab.MeshIP}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
		"db.example.com": {Ips: []string{"10.1.0.2"}, Registry: "External"},
	}})
	thaw()
	began := time.Now()
	m.AwaitMesh()
	if took := time.Since(began) - tr.loads[0].Report().Lag; took > lapse {
		t.Errorf("the agent captures after %v, want at most 2 s", took)
	}
	wait.Until(t, "the agent has the push", func() bool { return m.Lookup("db.example.com") == "10.1.0.2" })
	wait.Until(t, "no query passes the agent or is lost", func() bool {
		before := tr.count(load.Foreign, load.Lost)
		tr.more(time.Second)
		return tr.count(load.Foreign, load.Lost) == before
	})
}

// testFullConntrack fills the table of connections, under load. The kernel then refuses packets of the whole host. The agent
// lives on, and DNS is back within 2 s when there is room. V9.
func testFullConntrack(t *testing.T, m *lab.Machine) {
	process := running(m)
	limit, err := strconv.Atoi(strings.TrimSpace(m.Read("/proc/sys/net/netfilter/nf_conntrack_max")))
	if err != nil {
		t.Fatal(err)
	}
	var entries strings.Builder
	for i := range limit { // that the kernel does not evict
		fmt.Fprintf(&entries, "-I -p tcp -s 198.18.%d.%d -d 198.19.0.1 --sport %d --dport 443 --state ESTABLISHED -t 3600 -u ASSURED,SEEN_REPLY\n",
			i>>14, i>>6&255, 1024+i&63)
	}
	tr := startTraffic(t, m)
	refused := func() int { return tr.count(load.Unsent, load.Lost, load.Failed) }
	m.Net.Pipe(entries.String(), "sh", "-c", `conntrack -R - >/dev/null 2>&1 || true`) // the last ones find no room
	wait.Until(t, "the kernel refuses packets", func() bool { return refused() > 4*queriesPerSecond })
	m.Net.Exec("conntrack", "-D", "-d", "198.19.0.1")
	began := time.Now()
	m.AwaitMesh()
	wait.Until(t, "a forwarded name has its address", func() bool { return m.Lookup(fmt.Sprintf("n%d.example.org", time.Now().UnixNano())) == lab.NamedIP })
	if took := time.Since(began) - tr.loads[0].Report().Lag; took > lapse {
		t.Errorf("DNS is back %v after there is room, want at most 2 s", took)
	}
	if now := running(m); now != process {
		t.Errorf("the agent was %s, now %s", process, now)
	}
	wait.Until(t, "no query fails", func() bool {
		before := refused() + tr.count(load.Foreign)
		tr.more(time.Second)
		return refused()+tr.count(load.Foreign) == before
	})
}

// testTmpFull restarts the agent, by a command and by its death, while /tmp, /var/tmp and /run have no room, under load. It
// starts, and a stop leaves no rules. V1, V10.
func testTmpFull(t *testing.T, m *lab.Machine) {
	for _, dir := range []string{"/tmp", "/var/tmp"} {
		m.Run("mount", "-t", "tmpfs", "-o", "nr_inodes=1", "full", dir)
		if _, err := m.Try("mkdir", dir+"/more"); err == nil {
			t.Fatalf("%s has room", dir)
		}
	}
	m.Run("mount", "-o", "remount,size=1m", "/run")
	_, _ = m.Try("dd", "if=/dev/zero", "of=/run/filler", "bs=4k") // fails when there is no room
	if _, err := m.Try("dd", "if=/dev/zero", "of=/run/more", "bs=64k", "count=1"); err == nil {
		t.Fatal("/run is not full")
	}
	tr := startTraffic(t, m)
	m.Run("systemctl", "restart", "nametap.service")
	tr.more(time.Second)
	tr.none(load.Right)
	dies(t, m)
	m.AwaitMesh()
	m.Run("systemctl", "stop", "nametap.socket")
	wantNotCaptured(t, m)
	m.Run("sh", "-c", "rm -f /run/filler /run/more; mount -o remount,size=64m /run; umount /tmp /var/tmp")
}
