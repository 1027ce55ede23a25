package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/dnsproxy"
)

const (
	// ProgramUser is the user "nobody", and its group: with them queries are sent as a program sends
	// them.
	ProgramUser = 65534
	// programTimeout is how long they may take. A resolver of libc waits 5 s.
	programTimeout = 2 * time.Second
)

// An Identity is how an agent answers questions about itself.
type Identity struct{ id, version string }

// Identify asks the listeners of an agent about it until one answers.
func Identify(ctx context.Context, listeners []dnsproxy.Addr) (found Identity, err error) {
	err = errors.New("it has no DNS listener")
	for _, l := range listeners {
		if found.id, err = ask(ctx, listenerQuestion(l, askID)); err != nil {
			continue
		}
		if found.version, err = ask(ctx, listenerQuestion(l, askVersion)); err == nil {
			return found, nil
		}
	}
	return found, err
}

// AsProgram sends a question about the server itself to a nameserver, over UDP and TCP, as a
// program of another user does, and reports whether the agent with an identity answers. It needs
// root.
func AsProgram(ctx context.Context, server netip.AddrPort, agent Identity) []problems.Sent {
	networks := []string{"udp", "tcp"}
	found := make([]problems.Sent, len(networks))
	for i, network := range networks {
		sent := problems.Sent{To: server.String(), Network: network}
		text, err := askAs(ctx, question{what: fmt.Sprintf("querying %s over %s", server, network), network: network, to: server.String(), name: askID, limit: programTimeout})
		if err == nil && text == agent.id { // as a nameserver with the same host name may answer
			text, err = askAs(ctx, question{what: fmt.Sprintf("querying %s over %s", server, network), network: network, to: server.String(), name: askVersion, limit: programTimeout})
			sent.Agent = err == nil && text == agent.version
		}
		sent.Other = err == nil && !sent.Agent
		if err != nil {
			sent.Error = err.Error()
		}
		found[i] = sent
	}
	return found
}

// askAs is ask with a socket of another user, as the rules see it: they compare the user and the group of the thread
// that has made the socket.
func askAs(ctx context.Context, q question) (text string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if os.Geteuid() == 0 {
			_, _ = unix.SetfsgidRetGid(ProgramUser)
			_, _ = unix.SetfsuidRetUid(ProgramUser)
		}
		text, err = ask(ctx, q)
	}()
	<-done
	return text, err
}
