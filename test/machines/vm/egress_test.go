package vm

import (
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

// externalVIP leads to a server on the address that nameservers have for every name.
const externalVIP = "240.240.0.1:7"

// bootEgress boots a machine whose agent carries connections to an external host, whose server greets and then echoes.
func bootEgress(t *testing.T) *lab.Machine {
	t.Helper()
	m := lab.Boot(t)
	m.World.Exec("ip", "address", "add", lab.NamedIP+"/32", "dev", "lo")
	var listener net.Listener
	var err error
	m.World.Run(func() { listener, err = net.Listen("tcp", lab.NamedIP+":7") })
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
				_, _ = io.WriteString(conn, "220 db\n")
				_, _ = io.Copy(conn, conn) // until the client ends
			})
		}
	})
	m.World.Control.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		lab.Mesh:         {Ips: []string{lab.MeshIP}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
		"db.example.com": {Ips: []string{"240.240.0.1"}, Registry: "External"},
	}})
	m.Install("NAMETAP_EGRESS=true", "NAMETAP_DRAIN=2s")
	m.Start()
	return m
}

// TestEgressRestarts restarts the agent ten times while clients connect to a VIP: systemd holds the listeners, so
// no connection fails. An open connection goes on for --drain. E13, V1. A stop ends it, and leaves no rules. E14, V4.
func TestEgressRestarts(t *testing.T) {
	m := bootEgress(t)
	var carried, failed atomic.Int64
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
				if _, conn, err := m.Net.Greeting(externalVIP); err != nil {
					failed.Add(1)
				} else {
					conn.Close()
					carried.Add(1)
				}
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
	tr.none(load.Right)
	if n := failed.Load(); n > 0 {
		t.Errorf("%d connections of %d failed", n, n+carried.Load())
	}

	open := func() net.Conn {
		t.Helper()
		_, conn, err := m.Net.Greeting(externalVIP)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	conn, before := open(), running(m)
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
	wantNames(t, m, map[string]string{lab.Mesh: lab.MeshIP})
	next := open() // waits for the next agent
	if running(m) == before {
		t.Error("the agent has not restarted")
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection goes on after the drain")
	}

	m.Systemctl("stop")
	wantNames(t, m, map[string]string{lab.Mesh: lab.NamedIP})
	wantNotCaptured(t, m)
	if _, err := next.Read(make([]byte, 1)); err == nil {
		t.Error("the connection goes on after the stop")
	}
}
