package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/publicsuffix"
)

const (
	// parallelExecs is how many pods run a command at a time: each needs a process of kubectl.
	parallelExecs = 16
	// sinceKept is how old the failures are that are read.
	sinceKept = "10m"
	// maxAsked and maxFailed bound what is kept of a pod.
	maxAsked, maxFailed = 100, 20
)

// An asked counts the queries of a pod for the names of a domain.
type asked struct {
	Domain string `json:"domain"`
	counts
}

// A failed is a query without an answer. Its keys are those of `nametap tail`.
type failed struct {
	Time   time.Time `json:"time"`
	Name   string    `json:"name"`
	Type   string    `json:"type"`
	Rcode  string    `json:"rcode"`
	Server string    `json:"server,omitempty"`
	Reason string    `json:"reason,omitempty"`
}

// readQueries reads what the agent keeps of single queries, and for the time of --queries all of them. It returns why it could
// not, such as the lack of the right to run programs in the pod.
func (f *fleet) readQueries(ctx context.Context, a *agent) error {
	if a.path == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, f.queries+replyTime)
	defer cancel()
	program := []string{"nametap", "tail", "--output=json", "--since=" + sinceKept, "--no-follow"}
	if f.queries > 0 {
		program[len(program)-1] = "--for=" + f.queries.String()
	}
	cmd := exec.CommandContext(ctx, "kubectl", f.execArgs(a.Name, a.Namespace, program)...)
	var why bytes.Buffer
	cmd.Stderr = &why
	records, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return err
	}
	a.addQueries(records)
	if err = cmd.Wait(); err != nil && why.Len() > 0 { // without a text, there were no queries
		return errors.New(strings.TrimSpace(why.String()))
	}
	return nil
}

// addQueries adds the records of queries, one in a line.
func (a *agent) addQueries(records io.Reader) {
	a.Asked = []asked{}
	domains := map[string]*asked{}
	for decoder := json.NewDecoder(records); ; {
		var r failed
		if decoder.Decode(&r) != nil {
			break
		}
		domain := domainOf(r.Name)
		if domains[domain] == nil {
			domains[domain] = &asked{Domain: domain}
		}
		domains[domain].Queries++
		if r.Rcode == "NOERROR" || r.Rcode == "NXDOMAIN" {
			continue
		}
		domains[domain].Failures++
		a.Failed = append(a.Failed, r)
		if len(a.Failed) > maxFailed {
			a.Failed = slices.Delete(a.Failed, 0, 1)
		}
	}
	for _, d := range slices.SortedFunc(maps.Values(domains), func(a, b *asked) int {
		return cmp.Or(cmp.Compare(b.Failures, a.Failures), cmp.Compare(b.Queries, a.Queries), cmp.Compare(a.Domain, b.Domain))
	}) {
		if len(a.Asked) < maxAsked {
			a.Asked = append(a.Asked, *d)
		}
	}
}

// domainOf returns the domain that a name counts for: SERVICE.NAMESPACE of a Service, otherwise the domain that somebody has
// registered. libc appends the domains of the search list to other names, too: they count for what precedes it.
func domainOf(name string) string {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	labels := strings.Split(name, ".")
	if at := slices.Index(labels, "svc"); at > 1 {
		before := labels[:at-1]
		if service := before[len(before)-1]; len(before) <= 2 || strings.HasPrefix(before[0], "_") {
			return service + "." + labels[at-1]
		}
		name = strings.Join(before, ".")
	}
	if domain, err := publicsuffix.EffectiveTLDPlusOne(name); err == nil {
		return domain
	}
	return name
}
