package test

import (
	"io"
	"net"
	"regexp"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// E9: once data has ended in one direction, connection tracking forgets the connection after 60 s without a packet.
// The agent's probes come before that, so an answer that takes longer arrives.
func TestEgressHalfClosedIdle(t *testing.T) {
	t.Parallel()
	netns.Need(t, "ss")
	e := newEgressVM(t, "nft")
	release := make(chan struct{})
	e.serve(serverA+":7", func(conn *net.TCPConn) {
		_, _ = io.Copy(io.Discard, conn)
		<-release
		_, _ = io.WriteString(conn, "answer")
	})
	e.capture()
	conn := e.mustDial(vipA, "7")
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	// Each side of the agent has a keep-alive timer: ss shows it as "timer:(keepalive,19sec,0)".
	for _, filter := range []string{"sport = " + egressPort, "dst " + serverA} {
		wait.Until(t, "probes are due in less than 60 s: "+filter, func() bool {
			lines := strings.Split(strings.TrimSpace(e.Exec("ss", "-tnoH", filter)), "\n")
			return len(lines) == 1 && regexp.MustCompile(`timer:\(keepalive,[0-9]{1,2}(\.[0-9]+)?sec,`).MatchString(lines[0])
		})
	}
	close(release)
	if got, err := io.ReadAll(conn); err != nil || string(got) != "answer" {
		t.Errorf("%q, %v", got, err)
	}
}
