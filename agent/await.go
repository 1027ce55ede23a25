package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/iptables"
)

const (
	// awaitInterval is the pause between two attempts to reach an agent in another container.
	awaitInterval = 20 * time.Millisecond
	// awaitOther is how long Await waits for the second family after the first one has answered, and for the status
	// address, which opens before the listeners, after the listeners have answered.
	awaitOther = time.Second
	// awaitQuiet is how long the wait lasts before it is logged.
	awaitQuiet = time.Second
)

// ErrCapturesItself is the error if the rules would redirect the agent's own queries to the agent.
var ErrCapturesItself = errors.New("the rules would redirect the agent's own queries to itself")

// Await waits until an agent in another container of the pod answers, over UDP and TCP, where the rules redirect to. Then
// it waits until the agent is ready, so that even the first captured queries are answered from a table. statusAddr is the
// host:port of the agent's status endpoints. If only the listeners of one family answer, Await returns the rules without
// the other family.
//
// Await returns an error if ctx ends while it waits for listeners, and [ErrCapturesItself] if the rules would
// redirect the agent's own queries. If the agent is not ready when ctx ends, or its status address does not answer,
// Await logs that and returns the rules: the agent forwards without a table.
func Await(ctx context.Context, rules iptables.Config, statusAddr string, log *slog.Logger) (iptables.Config, error) {
	began := time.Now()
	rules, err := awaitListeners(ctx, rules, log)
	if err != nil {
		return rules, err
	}
	answered, user := time.Since(began), ""
	err = until(ctx, log.Info, "waiting for the table of mesh hosts", func() error {
		asked, says, err := AskHealth(ctx, &http.Transport{DisableKeepAlives: true}, statusAddr)
		switch {
		case err == nil:
			user = asked
			return says
		case user == "" && time.Since(began) > answered+awaitOther:
			return fmt.Errorf("%w; both containers need the same --status-addr: %w", errUnreachable, err)
		}
		return err
	})
	var uid, gid uint32
	n, _ := fmt.Sscanf(user, "%d:%d", &uid, &gid) // without a response the user is not known
	if n == 2 && !slices.Contains(rules.AgentUIDs, uid) && !slices.Contains(rules.AgentGIDs, gid) {
		return rules, fmt.Errorf("%w: it has uid %d and gid %d: run it as a user or group of --capture-agent-uid %v or --capture-agent-gid %v",
			ErrCapturesItself, uid, gid, rules.AgentUIDs, rules.AgentGIDs)
	}
	if err != nil {
		log.Warn("capturing without a table of mesh hosts: the agent forwards until it has one", "error", err)
		return rules, nil
	}
	log.Info("the agent is ready", "listeners", answered.Round(time.Millisecond), "after", time.Since(began).Round(time.Millisecond))
	return rules, nil
}

// errUnreachable ends the wait for an agent that cannot be asked whether it is ready.
var errUnreachable = errors.New("the status address does not answer")

// until calls try every awaitInterval until it returns nil or errUnreachable, and returns the error. If ctx ends, it returns
// the last error from before that. Once after awaitQuiet, it calls log with what it waits for, and the error.
func until(ctx context.Context, log func(string, ...any), waiting string, try func() error) (last error) {
	began, logged := time.Now(), false
	for {
		err := try()
		switch {
		case err == nil || errors.Is(err, errUnreachable):
			return err
		case ctx.Err() != nil:
			return cmp.Or(last, err)
		case time.Since(began) >= awaitQuiet && !logged:
			logged = true
			log(waiting, "error", err)
		}
		last = err
		clock.Sleep(ctx, awaitInterval)
	}
}

// awaitListeners waits until the listeners of all wanted families answer. It returns the rules without a family that has
// not answered within the time awaitOther after the other one. It keeps those of a family that the host lacks: no query uses
// them.
func awaitListeners(ctx context.Context, rules iptables.Config, log *slog.Logger) (fitted iptables.Config, err error) {
	var first time.Time // when a family first answered
	err = until(ctx, log.Info, "waiting for the agent", func() error {
		var missing, silent error
		served := false
		fitted = rules
		found := probe.Listeners(ctx, probe.At(rules.Port, rules.Families()...)...)
		for i, f := range rules.Families() {
			err := errors.Join(found[2*i].Err(), found[2*i+1].Err())
			silent, served = errors.Join(silent, err), served || err == nil
			if err != nil && found[2*i].State != probe.Absent {
				fitted, missing = fitted.Without(f), errors.Join(missing, err)
			}
		}
		if served && first.IsZero() {
			first = time.Now()
		}
		switch {
		case !served || missing != nil && time.Since(first) < awaitOther:
			return silent
		case missing != nil:
			log.Warn("DNS over one family is not captured: the agent does not answer over it", "error", missing)
		}
		return nil
	})
	return fitted, err
}

// AskHealth asks an agent at its status address whether it is ready: it has a table, or has waited for a table for
// [Config.ReadyTimeout]. It returns the agent's "uid:gid" from [userHeader], and says why the agent is not ready; nil if
// it is. transport connects to the agent.
func AskHealth(ctx context.Context, transport http.RoundTripper, addr string) (user string, says, err error) {
	to, err := listen.Reachable(addr)
	if err != nil {
		return "", nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+to+"/healthz/ready", http.NoBody)
	if err != nil {
		return "", nil, err
	}
	client := http.Client{Transport: transport, Timeout: probe.Timeout}
	response, err := client.Do(request)
	if err != nil {
		return "", nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<10))
	if err == nil && response.StatusCode != http.StatusOK {
		says = errors.New(strings.TrimSpace(string(body)))
	}
	return response.Header.Get(userHeader), says, err
}

// AwaitReady waits until an agent is ready. transport connects to the agent. If ctx ends first, the error says why the agent
// is not ready.
func AwaitReady(ctx context.Context, transport http.RoundTripper) error {
	return until(ctx, slog.New(slog.DiscardHandler).Info, "", func() error {
		_, says, err := AskHealth(ctx, transport, "localhost:80")
		return cmp.Or(says, err)
	})
}
