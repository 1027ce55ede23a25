// Package chart has only tests, of the Helm chart in deploy/chart, with the commands of Helm 3 and 4.
// `make chart` runs them. They need neither root nor a cluster; package interop installs the chart in
// one.
package chart
