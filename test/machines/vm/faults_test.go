package vm_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// push pushes the mesh name, and hosts others, whose names have a prefix and which all have one address.
func push(m *vm.Machine, prefix, address string, hosts int) {
	table := map[string]*api.NameTable_NameInfo{
		vm.Mesh: {Ips: []string{vm.MeshIP}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
	}
	for i := range hosts {
		name := fmt.Sprintf("%s%d", prefix, i)
		table[name+".shop.svc.cluster.local"] = &api.NameTable_NameInfo{Ips: []string{address}, Registry: "Kubernetes", Shortname: name, Namespace: "shop"}
	}
	m.World.Control.Push(&api.NameTable{Table: table})
}

// awaitHost returns when the machine can look up the first host of a push.
func awaitHost(t *testing.T, m *vm.Machine, prefix, address string) {
	t.Helper()
	name := prefix + "0.shop.svc.cluster.local"
	wait.Until(t, "the machine can look up "+name, func() bool { return m.Lookup(name) == address })
}

// TestFrozen stops all processes of the machine for longer than any watchdog waits, under load, as a suspend or a
// debugger of the whole machine does. DNS is back within 2 s, from the nameserver. Within 2 s after the end, the
// agent captures again, and takes pushes. V2, V7.
func TestFrozen(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	tr.forwardedGap()
	thaw := m.Freeze()
	const frozen = 15 * time.Second
	foreign := tr.count(load.Foreign)
	wait.Until(t, "the nameserver answers instead of the agent", func() bool {
		return tr.count(load.Foreign) > foreign+int(frozen.Seconds()*queriesPerSecond*0.8*0.8)
	})
	tr.wantOutage()
	push(m, "after", "10.1.0.2", 1)
	thaw()
	began := time.Now()
	right := tr.count(load.Right)
	m.AwaitMesh()
	took := time.Since(began)
	t.Logf("the agent captures %v after the end", took.Round(time.Millisecond))
	if took > lapse {
		t.Errorf("the agent captures after %v, want at most 2 s", took)
	}
	awaitHost(t, m, "after", "10.1.0.2")
	t.Logf("it has the next push %v after the end", time.Since(began).Round(time.Millisecond))
	wait.Until(t, "the agent answers as before", func() bool { return tr.count(load.Right) > right+2*queriesPerSecond })
	lost, past := tr.count(load.Lost), tr.count(load.Foreign)
	tr.gap()
	tr.more(time.Second)
	if gap := tr.gap(); gap > time.Second || tr.count(load.Lost) > lost || tr.count(load.Foreign) > past {
		t.Errorf("afterwards, %d queries are lost and %d pass the agent, longest gap %v", tr.count(load.Lost)-lost, tr.count(load.Foreign)-past, gap)
	}
	tr.stop()
}

// TestFullDisk fills the disk of the state directory. The agent starts, answers and takes pushes. It says once that
// the table is not saved, and keeps the last one that was. When there is room again, it saves the table. C7.
func TestFullDisk(t *testing.T) {
	const dir = "/var/lib/nametap"
	m := vm.Boot(t)
	m.Install()
	m.Run("systemd-sysusers", "nametap.conf")
	m.Run("mkdir", "-p", dir)
	m.Run("mount", "-t", "tmpfs", "-o", "size=256k,mode=0700,uid=nametap,gid=nametap", "state", dir)
	push(m, "first", "10.1.0.2", 10)
	m.Start()
	awaitHost(t, m, "first", "10.1.0.2")
	wait.Until(t, "the table is saved", func() bool {
		_, err := m.Try("grep", "--quiet", "first0", dir+"/nametable.snapshot")
		return err == nil
	})
	_, _ = m.Try("dd", "if=/dev/zero", "of="+dir+"/filler", "bs=4k") // fails when there is no room
	tr := startTraffic(t, m)
	for i := range 5 {
		prefix := fmt.Sprintf("next%dx", i)
		push(m, prefix, "10.1.0.3", 2000)
		awaitHost(t, m, prefix, "10.1.0.3")
	}
	const said = "snapshot of the table not written"
	wait.Until(t, "the agent logs that the table is not saved", func() bool { return strings.Contains(m.Journal("nametap.service"), said) })
	if n := strings.Count(m.Journal("nametap.service"), said); n != 1 {
		t.Errorf("the agent says %d times that the table is not saved, want once", n)
	}
	m.Run("systemctl", "restart", "nametap.service")
	kill(m, "nametap.service")
	awaitHost(t, m, "next4x", "10.1.0.3")
	if mesh, forwarded := tr.stop(load.Right); mesh > 2 || forwarded > 20 { // a crash loses some
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
	m.World.Control.Stop()
	m.Run("systemctl", "restart", "nametap.service")
	awaitHost(t, m, "first", "10.1.0.2") // from the snapshot
	m.Run("rm", dir+"/filler")
	m.World.Run(func() { m.World.Control = fakexds.Start(t, fakexds.Options{Addr: vm.Control}) })
	push(m, "last", "10.1.0.4", 10)
	awaitHost(t, m, "last", "10.1.0.4")
	wait.Until(t, "the table is saved", func() bool {
		_, err := m.Try("grep", "--quiet", "last0", dir+"/nametable.snapshot")
		return err == nil
	})
}

// TestFullRun fills /run, under load, and restarts the agent, by a command and by its death. DNS goes on. V1.
func TestFullRun(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	m.Run("mount", "-o", "remount,size=1m", "/run")
	tr := startTraffic(t, m)
	_, _ = m.Try("dd", "if=/dev/zero", "of=/run/filler", "bs=4k") // fails when there is no room
	if _, err := m.Try("dd", "if=/dev/zero", "of=/run/more", "bs=64k", "count=1"); err == nil {
		t.Fatal("/run is not full")
	}
	for range 3 {
		m.Run("systemctl", "restart", "nametap.service")
		tr.more(time.Second)
	}
	for range 3 {
		before := running(m)
		kill(m, "nametap.service")
		wait.Until(t, "systemd has started another agent", func() bool {
			now := running(m)
			return now != before && strings.Contains(now, "ActiveState=active")
		})
		tr.more(2 * time.Second)
	}
	m.AwaitMesh()
	if n := tr.count(load.Foreign, load.Wrong, load.Failed); n > 0 {
		t.Errorf("%d queries have a wrong answer", n)
	}
	if mesh, forwarded := tr.stop(load.Right); mesh > 6 || forwarded > 60 { // a crash loses some
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
}
