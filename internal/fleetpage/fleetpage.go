// Package fleetpage has the page that shows all agents: `kubectl nametap fleet --output html` prints it with its data, and
// nametap-discovery serves it at /fleet. The page is one static file, which loads nothing from elsewhere.
package fleetpage

import (
	"bytes"
	_ "embed"
	"time"
)

//go:embed page.html
var page []byte

// source is the element of the page for the data. As it is, the page requests its data from the server of the page.
const source = `<script id="data" type="application/x-ndjson" data-source="/debug/agents"></script>`

// Page returns the page as a server serves it. The caller must not change it.
func Page() []byte { return page }

// With returns the page with agents, as they were at a time: an object in JSON in each line, in which no text has the
// character <.
func With(agents []byte, taken time.Time) []byte {
	element := `<script id="data" type="application/x-ndjson" data-taken="` + taken.Format(time.RFC3339) + `">` + "\n" + string(agents) + `</script>`
	return bytes.Replace(page, []byte(source), []byte(element), 1)
}
