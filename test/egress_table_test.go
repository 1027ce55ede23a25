package test

import (
	"bufio"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// E13, E20: connections that wait for the first table reach their hosts as soon as it comes, also during the drain.
func TestEgressFirstTable(t *testing.T) {
	t.Parallel()
	for name, drains := range map[string]bool{"running": false, "draining": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEgressVM(t, "nft")
			e.net.Serve(serverA+":7", greeter("one"))
			e.xds.Stop()
			a := e.launch("--capture", "--drain", "10m")
			wait.Until(t, "connections to VIPs are captured", func() bool { return strings.Contains(e.Rules(), "--to-ports "+egressPort) })
			const clients = 90
			greetings := make(chan string, clients)
			for i := range clients {
				conn := e.mustDial(vipA, "7")
				if i%3 == 0 { // some give up
					_ = conn.SetLinger(0)
					conn.Close()
					continue
				}
				go func() {
					line, err := bufio.NewReader(conn).ReadString('\n')
					if err != nil {
						line = err.Error()
					}
					greetings <- line
				}()
			}
			wait.Until(t, "the resets are noticed", func() bool { return e.metric("nametap_egress_open_connections") == clients*2/3 })
			if drains {
				if err := a.Process.Signal(terminate); err != nil {
					t.Fatal(err)
				}
				wait.Until(t, "the agent drains", func() bool { return a.log.Count("draining") > 0 })
			}
			var err error
			e.Run(func() { err = e.xds.Restart() })
			if err != nil {
				t.Fatal(err)
			}
			wait.Until(t, "there is a table", func() bool { return strings.Contains(e.get("/debug/ndsz"), exactA) })
			for range clients * 2 / 3 {
				if got := wait.For(t, "a greeting", greetings); got != "220 one\n" && stoodStill(t) {
					return // for longer than connections wait for a table
				} else if got != "220 one\n" {
					t.Fatalf("%q", got)
				}
			}
		})
	}
}
