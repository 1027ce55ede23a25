package vm_test

import (
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// An external host whose VIP leads to a server on the address that nameservers have for every name.
const (
	externalHost = "db.example.com"
	externalVIP  = "240.240.0.1"
	greeting     = "220 db\n"
)

// bootEgress boots a machine whose agent will carry connections. It is not started.
func bootEgress(t *testing.T) *vm.Machine {
	t.Helper()
	m := vm.Boot(t)
	m.World.Exec("ip", "address", "add", vm.NamedIP+"/32", "dev", "lo")
	var listener net.Listener
	var err error
	m.World.Run(func() { listener, err = net.Listen("tcp", vm.NamedIP+":7") })
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	t.Cleanup(func() { listener.Close(); serving.Wait() })
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				_, _ = io.WriteString(conn, greeting)
				_, _ = io.Copy(conn, conn) // until the client ends
			})
		}
	})
	m.World.Control.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		vm.Mesh:      {Ips: []string{vm.MeshIP}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
		externalHost: {Ips: []string{externalVIP}, Registry: "External"},
	}})
	m.Install("NAMETAP_EGRESS=true", "NAMETAP_DRAIN=2s")
	return m
}

// connect connects to the VIP and reads the greeting.
func connect(m *vm.Machine) (net.Conn, error) {
	var conn net.Conn
	var err error
	m.Net.Run(func() { conn, err = net.DialTimeout("tcp", externalVIP+":7", wait.Limit) })
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(wait.Limit))
	got := make([]byte, len(greeting))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != greeting {
		conn.Close()
		return nil, fmt.Errorf("a greeting %q: %w", got, err)
	}
	return conn, nil
}

// TestEgressRestarts restarts the agent ten times while clients connect to a VIP: systemd holds the listeners, so
// no connection fails. E13, V1.
func TestEgressRestarts(t *testing.T) {
	m := bootEgress(t)
	m.Start()
	var carried, failed atomic.Int64
	var lastError atomic.Value
	stop := make(chan struct{})
	var clients sync.WaitGroup
	end := sync.OnceFunc(func() { close(stop); clients.Wait() })
	defer end()
	for range 4 {
		clients.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				conn, err := connect(m)
				if err != nil {
					failed.Add(1)
					lastError.Store(err.Error())
					return
				}
				conn.Close()
				carried.Add(1)
			}
		})
	}
	more := func() {
		want := carried.Load() + 200
		wait.Until(t, "connections are carried", func() bool { return carried.Load() >= want })
	}
	tr := startTraffic(t, m)
	more()
	replace(tr, 10, func(int) {
		m.Run("systemctl", "restart", "nametap")
		more()
	})
	end()
	if mesh, forwarded := tr.stop(load.Right); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
	t.Logf("%d connections were carried during ten restarts", carried.Load())
	if n := failed.Load(); n > 0 {
		t.Errorf("%d connections failed, the last one by: %v", n, lastError.Load())
	}
}

// TestEgressRestartDrains restarts the agent with an open connection: it goes on for --drain, and a new one
// waits for the next agent. E13.
func TestEgressRestartDrains(t *testing.T) {
	m := bootEgress(t)
	m.Start()
	conn, err := connect(m)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	before := running(m)
	m.Run("systemctl", "--no-block", "restart", "nametap")
	wait.Until(t, "the agent drains", func() bool {
		return strings.Contains(m.Journal("nametap.service"), "connections to VIPs go on")
	})
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Errorf("an open connection in the drain: %v", err)
	}
	if got := m.Lookup(vm.Mesh); got != vm.MeshIP {
		t.Errorf("in the drain, the mesh name has %s", got)
	}
	began := time.Now()
	next, err := connect(m)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	t.Logf("a new connection waited %v", time.Since(began))
	if running(m) == before {
		t.Error("the agent has not restarted")
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection goes on after the drain")
	}
}

// TestEgressStops stops the agent while connections are open: the host's DNS is back at once, and nothing of the
// rules is left after the drain. E14, V4.
func TestEgressStops(t *testing.T) {
	m := bootEgress(t)
	m.Start()
	conn, err := connect(m)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	m.Run("systemctl", append([]string{"stop"}, vm.Units()...)...)
	if got := m.Lookup(vm.Mesh); got != vm.NamedIP {
		t.Errorf("after the stop, the mesh name has %s", got)
	}
	if rules := m.Net.Rules(); strings.Contains(rules, "NAMETAP") {
		t.Errorf("rules are left:\n%s", rules)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection goes on after the stop")
	}
}

// stored returns how many sockets of the agent systemd has stored.
func stored(m *vm.Machine) string {
	return strings.TrimSpace(m.Run("systemctl", "show", "--property=NFileDescriptorStore", "--value", "nametap.service"))
}

// TestEgressPortTaken boots a machine where another program has the port for connections to VIPs. DNS is captured
// and answered, the agent says what is missing, and carries connections once the port is free. Then systemd holds
// the listeners. It closes them when a setting changes. E13, V1.
func TestEgressPortTaken(t *testing.T) {
	m := bootEgress(t)
	m.Write("/etc/systemd/system/squatter.service", `[Unit]
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=notify
NotifyAccess=all
User=nobody
ExecStart=perl -MSocket -MIO::Socket::IP -e 'my @s = map { IO::Socket::IP->new(LocalHost => $_, LocalPort => 15054, Listen => 1) or die } "127.0.0.1", "::1"; system "systemd-notify", "--ready"; sleep 6000'
[Install]
WantedBy=sysinit.target
`)
	m.Start()
	m.Run("systemctl", "enable", "squatter.service")
	m.Reboot()
	if state := strings.TrimSpace(m.Run("systemctl", "show", "--property=ActiveState", "--value", "squatter.service")); state != "active" {
		t.Fatalf("the other program is %s", state)
	}
	for name, want := range map[string]string{vm.Mesh: vm.MeshIP, "other.example.org": vm.NamedIP} {
		if got := m.Lookup(name); got != want {
			t.Errorf("%s has %s, want %s", name, got, want)
		}
	}
	if status := m.Run("nametap", "status"); !strings.Contains(status, "15054: bind: address already in use") {
		t.Errorf("the status does not name the port that is taken:\n%s", status)
	}
	m.Run("systemctl", "disable", "--now", "squatter.service")
	wait.Until(t, "connections are carried", func() bool {
		conn, err := connect(m)
		if err != nil {
			return false
		}
		conn.Close()
		return true
	})
	const status, vips = 1, 2 // sockets
	wait.Until(t, "systemd holds the sockets", func() bool { return stored(m) == strconv.Itoa(status+vips) })
	kill(m, "nametap.service")
	conn, err := connect(m)
	if err != nil {
		t.Fatalf("while the next agent starts: %v", err)
	}
	conn.Close()
	m.AwaitMesh()
	set(m, "NAMETAP_EGRESS_ADDR", "127.0.0.1:15154")
	m.Run("systemctl", "restart", "nametap.service")
	wait.Until(t, "systemd holds the other socket", func() bool { return stored(m) == strconv.Itoa(status+1) })
	if conn, err = connect(m); err != nil {
		t.Fatalf("after a change of the address: %v", err)
	}
	conn.Close()
	set(m, "NAMETAP_EGRESS", "false")
	m.Run("systemctl", "restart", "nametap.service")
	wait.Until(t, "systemd holds no socket for VIPs", func() bool { return stored(m) == strconv.Itoa(status) })
}
