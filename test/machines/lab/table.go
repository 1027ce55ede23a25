package lab

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// A Table is a NameTable by host.
type Table map[string]Entry

// An Entry is the entry of a host in a table.
type Entry struct {
	IPs       []string `json:"ips"`
	Registry  string   `json:"registry"`
	Shortname string   `json:"shortname"`
	Namespace string   `json:"namespace"`

	// istiod's tables have none of these.
	Alias        string          `json:"alias"`
	Headless     bool            `json:"headless"`
	Ports        json.RawMessage `json:"ports"`
	Destinations json.RawMessage `json:"destinations"`
}

// String returns what is compared.
func (e Entry) String() string {
	text := fmt.Sprintf("%v %s", e.IPs, e.Registry)
	if e.Shortname != "" {
		text += fmt.Sprintf(" %s.%s", e.Shortname, e.Namespace)
	}
	if e.Alias != "" {
		text += " alias " + e.Alias
	}
	return text
}

// normal returns the table with lower-case hosts without a trailing dot, as the agent has them, and with the addresses of
// each sorted and without duplicates. istiod sends them in a changing order.
func (t Table) normal() Table {
	all := Table{}
	for host, e := range t {
		slices.Sort(e.IPs)
		e.IPs = slices.Compact(e.IPs)
		all[strings.TrimSuffix(strings.ToLower(host), ".")] = e
	}
	return all
}

// Diff returns a line for each entry in which t differs from other; it is empty if they are equal.
func (t Table) Diff(other Table) string {
	var lines []string
	for host, e := range t {
		if o, found := other[host]; !found {
			lines = append(lines, fmt.Sprintf("- %s %v", host, e))
		} else if o.String() != e.String() {
			lines = append(lines, fmt.Sprintf("- %s %v\n+ %s %v", host, e, host, o))
		}
	}
	for host, o := range other {
		if _, found := t[host]; !found {
			lines = append(lines, fmt.Sprintf("+ %s %v", host, o))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// Table returns the agent's table.
func (a *Agent) Table() Table {
	a.tb.Helper()
	text := a.Place.Nametap("table", "--output", "json")
	var shown struct{ Table Table }
	decoder := json.NewDecoder(bytes.NewReader([]byte(text)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&shown); err != nil {
		a.tb.Fatalf("nametap table: %v\n%s", err, text)
	}
	return shown.Table.normal()
}

// Has waits until the agent's table has a host with an address.
func (a *Agent) Has(host, address string) {
	a.tb.Helper()
	wait.Until(a.tb, host+" is in the table", func() bool { return slices.Contains(a.Table()[host].IPs, address) })
}

// WantTable waits until an agent's table is istiod's for this agent, and returns it.
func (d *Istiod) WantTable(a *Agent) Table {
	a.tb.Helper()
	var want Table
	var diff string
	defer func() {
		if diff != "" {
			a.tb.Errorf("istiod (-) and the agent (+) have different tables:\n%s", diff)
		}
	}()
	wait.Until(a.tb, "the agent's table matches istiod's", func() bool {
		var ok bool
		if want, ok = d.Table(a.Name + "." + a.Namespace); !ok {
			diff = "istiod has no stream of " + a.Name
			return false
		}
		diff = want.Diff(a.Table())
		return diff == ""
	})
	return want
}
