package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/sockets"
)

const (
	// ProgramUser is the user "nobody" and its group. AsProgram sends queries as this user, so the rules treat the
	// queries like queries of any program.
	ProgramUser = 65534
	// programTimeout is how long an answer to a query of AsProgram may take.
	programTimeout = 2 * time.Second
)

// An Identity distinguishes an agent from other servers: it has the agent's answers to queries for id.server and
// version.server.
type Identity struct{ id, version string }

// Identify queries the listeners of an agent, one after another, until a listener answers. It returns the Identity
// of the agent.
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

// AsProgram sends queries for id.server and version.server to a nameserver, over UDP and over TCP, as a program of
// another user would. It reports for each network whether the agent with the given Identity answers. AsProgram must run
// as root to send the queries as another user.
func AsProgram(ctx context.Context, server netip.AddrPort, agent Identity) []problems.Sent {
	networks := []string{"udp", "tcp"}
	found := make([]problems.Sent, len(networks))
	for i, network := range networks {
		sent := problems.Sent{To: server.String(), Network: network}
		q := question{description: fmt.Sprintf("querying %s over %s", server, network), network: network, to: server.String(), limit: programTimeout}
		q.name = askID
		text, err := askAs(ctx, q)
		if err == nil && text == agent.id { // a nameserver with the same host name may give the same answer
			q.name = askVersion
			text, err = askAs(ctx, q)
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

// askAs is like ask, but if this process is root, it uses a socket of ProgramUser, which the rules treat like the
// socket of any program.
func askAs(ctx context.Context, q question) (text string, err error) {
	if os.Geteuid() != 0 {
		return ask(ctx, q)
	}
	err = sockets.AsUser(ProgramUser, ProgramUser, func() error {
		text, err = ask(ctx, q)
		return err
	})
	return text, err
}
